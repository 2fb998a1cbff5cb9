// Where the newest tokens of a text stood before: engine/drafters/history.py, place by place.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

namespace fr {

constexpr int32_t GAP = -1;

// A common suffix of `length` tokens; the token behind it is tokens[behind], and after `period` tokens it begins anew (0: it ends).
struct Match {
    int length, source;
    int64_t behind;
    const std::vector<int32_t>* tokens;
    int64_t period;

    // The token `depth` places behind the suffix, GAP where there is none.
    int32_t after(int64_t depth) const {
        int64_t place = behind + depth;
        if (place >= int64_t(tokens->size())) {
            if (!period) return GAP;
            place = behind + depth % period;
        }
        return (*tokens)[place];
    }

    // The longest first, then those of the text itself, then the newest.
    bool operator<(const Match& other) const {
        if (length != other.length) return length > other.length;
        return source != other.source ? source < other.source : behind > other.behind;
    }
};

class History {
public:
    History(int64_t most, int64_t size) : tokens{GAP}, most_(most), ones_{0}, threes_{0} { open(std::min(size, most)); }

    int64_t told() const { return base_ + int64_t(tokens.size()) - 1; }

    void extend(const int32_t* more, int64_t count) {
        const uint32_t mask = (1u << bits_) - 1;
        const int shift = 32 - bits_;
        int64_t place = told();
        const size_t n = tokens.size();
        uint32_t c = tokens[n - 1], b = n > 1 ? tokens[n - 2] : GAP, a = n > 2 ? tokens[n - 3] : GAP;
        for (int64_t i = 0; i < count; ++i, ++place) {
            int64_t &one = heads_one_[c & mask], &three = heads_three_[hash(a, b, c) >> shift];
            ones_.back() = one, threes_.back() = three;
            one = three = place;
            tokens.push_back(more[i]), ones_.push_back(0), threes_.push_back(0);
            a = b, b = c, c = uint32_t(more[i]);
        }
        if (int64_t(tokens.size()) > 2 * most_)
            cut();
        else if (int64_t(tokens.size()) > int64_t(2) << bits_ && int64_t(1) << bits_ < most_)
            grow();
    }

    // Where the end of `tail` stood before, at most so many places; it may be this history's own.
    void find(const std::vector<int32_t>& tail, size_t most, int source, std::vector<Match>& found) const {
        const int64_t at = int64_t(tail.size()) - 1;
        if (at < 1) return;
        const int32_t c = tail[at], b = tail[at - 1], a = at > 1 ? tail[at - 2] : GAP;
        const int64_t own = &tail == &tokens ? int64_t(tokens.size()) - 1 : 0;
        const size_t full = found.size() + most;
        const auto add = [&](int length, int64_t index) {
            found.push_back({length, source, index + 1, &tokens, own ? own - index : 0});
            return found.size() == full;
        };
        int64_t index = at > 2 ? heads_three_[hash(a, b, c) >> (32 - bits_)] - base_ : 0;
        for (int steps = STEPS; index > 0 && steps; index = threes_[index] - base_, --steps)
            if (tokens[index] == c && tokens[index - 1] == b && tokens[index - 2] == a) {
                int same = 3;
                while (same < LONGEST && same < at && tokens[index - same] == tail[at - same]) ++same;
                if (add(same, index)) return;
            }
        index = heads_one_[uint32_t(c) & ((1u << bits_) - 1)] - base_;
        for (int steps = STEPS; index > 0 && steps; index = ones_[index] - base_, --steps)
            if (tokens[index] == c) {
                const int same = at < 2 || tokens[index - 1] != b ? 1 : at < 3 || tokens[index - 2] != a ? 2 : 3;
                if (same < 3 && add(same, index)) return;
            }
    }

    // The tokens behind the first `place` ones, as far as they are remembered.
    std::vector<int32_t> since(int64_t place) const {
        const int64_t first = std::max<int64_t>(1, place + 1 - base_);
        if (first >= int64_t(tokens.size())) return {};
        return {tokens.begin() + first, tokens.end()};
    }

    // The same without a copy, and nothing where not all of them are remembered.
    std::span<const int32_t> behind(int64_t place) const {
        if (place < base_ || place > told()) return {};
        return std::span(tokens).subspan(size_t(place + 1 - base_));
    }

    std::vector<int32_t> tokens;

private:
    static constexpr int STEPS = 4, LONGEST = 16;

    static uint32_t hash(uint32_t a, uint32_t b, uint32_t c) { return a * 0x9E3779B1u + b * 0x85EBCA77u + c * 0xC2B2AE3Du; }

    void open(int64_t size) {
        bits_ = std::max(8, int(std::bit_width(uint64_t(size))));
        heads_one_.assign(size_t(1) << bits_, 0);
        heads_three_.assign(size_t(1) << bits_, 0);
    }

    void grow() {
        const std::vector<int32_t> known = std::move(tokens);
        tokens = {known[0]}, ones_ = {0}, threes_ = {0};
        open(int64_t(2) << bits_);
        extend(known.data() + 1, int64_t(known.size()) - 1);
    }

    void cut() {
        const int64_t gone = int64_t(tokens.size()) - most_;
        tokens.erase(tokens.begin(), tokens.begin() + gone);
        ones_.erase(ones_.begin(), ones_.begin() + gone);
        threes_.erase(threes_.begin(), threes_.begin() + gone);
        tokens[0] = GAP;
        base_ += gone;
    }

    int64_t most_, base_ = 0;
    int bits_ = 0;
    std::vector<int64_t> ones_, threes_, heads_one_, heads_three_;
};

}  // namespace fr
