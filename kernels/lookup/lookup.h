// Guesses from texts and tables, as trees: engine/drafters/{calibration,suffix,grams,dag}.py, number by number.
#pragma once

#include <cmath>
#include <queue>
#include <string>

#include "history.h"

namespace fr {

// The guesses for one row: parents before children, −1 = the root. `kind`: cells of a calibration; `sources`: bits of who says so.
struct Tree {
    std::vector<int32_t> token, parent, kind, sources;
    std::vector<double> confidence;

    int size() const { return int(token.size()); }
    void clear() { token.clear(), parent.clear(), kind.clear(), sources.clear(), confidence.clear(); }
    int add(int32_t guess, int32_t above, int32_t cell, double sure) {
        token.push_back(guess), parent.push_back(above), kind.push_back(cell), confidence.push_back(sure);
        return size() - 1;
    }
    // Node `from` in an earlier place; and the first `count` nodes alone.
    void move(int from, int to, int32_t above) {
        token[to] = token[from], parent[to] = above, kind[to] = kind[from], confidence[to] = confidence[from];
        if (!sources.empty()) sources[to] = sources[from];
    }
    void cut(int count) {
        token.resize(count), parent.resize(count), kind.resize(count), confidence.resize(count);
        if (!sources.empty()) sources.resize(count);
    }
};

// How often guesses of a kind hold.
class Calibration {
public:
    Calibration(const double* prior, int cells) : rate(prior, prior + cells), weight_(cells, STRENGTH) {}

    // What became of a tree, which is used up: the tokens that followed its root.
    void settle(Tree& tree, const int32_t* truth, int64_t count) {
        reached_.assign(tree.size(), -1);
        for (int i = 0; count && i < tree.size(); ++i) {
            const int depth = tree.parent[i] < 0 ? 0 : reached_[tree.parent[i]];
            if (depth < 0 || depth >= count) continue;
            const int32_t cell = tree.kind[i];
            if (weight_[cell] < MEMORY) ++weight_[cell];
            if (tree.token[i] == truth[depth]) {
                rate[cell] += (1.0 - rate[cell]) / weight_[cell];
                reached_[i] = depth + 1;
            } else {
                rate[cell] -= rate[cell] / weight_[cell];
            }
        }
        tree.clear();
    }

    std::vector<double> rate;

private:
    static constexpr int STRENGTH = 16, MEMORY = 512;
    std::vector<int> weight_, reached_;
};

// A node that may be next: the likeliest first, then the one that was found first.
template <class More>
struct Waiting {
    double survival;
    int order;
    int32_t token, parent, kind;
    double confidence;
    More more;

    bool operator<(const Waiting& other) const {
        return survival != other.survival ? survival < other.survival : order > other.order;
    }
};

template <class T>
T taken(std::priority_queue<T>& waiting, bool tree) {
    T next = waiting.top();
    waiting.pop();
    if (!tree) waiting = {};
    return next;
}

// The tree that matches of a text span. `voters` of a node: bits of the matches that agree so far.
class Spanned {
public:
    Spanned(std::vector<Match>& matches, const std::vector<double>& rate) : matches_(matches), rate_(rate) {
        std::sort(matches.begin(), matches.end());
    }

    // The likeliest `most` nodes, as far as they are as likely as `least`.
    void grow(Tree& out, int most, double least, bool tree) {
        uint32_t voters = (1u << matches_.size()) - 1;
        int depth = 0;
        double survival = 1.0;
        for (int at = -1;;) {
            branch(voters, at, depth, survival, least);
            if (waiting_.empty()) return;
            const auto next = taken(waiting_, tree);
            at = out.add(next.token, next.parent, next.kind, next.confidence);
            if (at + 1 == most) return;
            voters = next.more.voters, depth = next.more.depth, survival = next.survival;
        }
    }

private:
    struct More {
        uint32_t voters;
        int depth;
    };
    enum { SOLE, ALL, MOST, FEW, SHORTER, VOTES };
    static constexpr int BUCKETS = 12;

    static int bucket(int length) {
        constexpr int OF[] = {0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 9, 9, 10, 10, 10, 10};
        return length < int(std::size(OF)) ? OF[length] : BUCKETS - 1;
    }

    // What the voters say follows a node.
    void branch(uint32_t voters, int at, int depth, double survival, double least) {
        int32_t guesses[8];
        uint32_t agree[8];
        int kinds = 0, cast = 0;
        for (uint32_t left = voters; left; left &= left - 1) {
            const uint32_t bit = left & -left;
            const int32_t guess = matches_[std::countr_zero(left)].after(depth);
            if (guess < 0) continue;
            ++cast;
            int kind = 0;
            while (kind < kinds && guesses[kind] != guess) ++kind;
            if (kind == kinds) guesses[kinds] = guess, agree[kinds++] = 0;
            agree[kind] |= bit;
        }
        const int top = kinds ? matches_[std::countr_zero(agree[0])].length : 0;
        for (int i = 0; i < kinds; ++i) {
            const Match& longest = matches_[std::countr_zero(agree[i])];
            const int n = std::popcount(agree[i]);
            const int vote = longest.length < top ? SHORTER : n < cast ? (2 * n >= cast ? MOST : FEW) : n == 1 ? SOLE : ALL;
            const int kind = ((longest.source * VOTES + vote) * 2 + (depth > 0)) * BUCKETS + bucket(depth + longest.length);
            const double alive = survival * rate_[kind];
            if (alive < least) continue;
            // Where only one text goes on, nothing as likely comes between.
            const bool next = voters == agree[i] && std::has_single_bit(voters) && (waiting_.empty() || alive >= waiting_.top().survival);
            waiting_.push({alive, next ? 0 : ++count_, guesses[i], at, kind, rate_[kind], {agree[i], depth + 1}});
        }
    }

    std::vector<Match>& matches_;
    const std::vector<double>& rate_;
    std::priority_queue<Waiting<More>> waiting_;
    int count_ = 0;
};

// What a writer says after up to three tokens: a table that never changes. A context and its followers share a line of the cache.
class Grams {
public:
    static constexpr int FOLLOWERS = 4, WORD = 21;
    static constexpr uint64_t MASKS[] = {(uint64_t(1) << 3 * WORD) - 1, (uint64_t(1) << 2 * WORD) - 1, (uint64_t(1) << WORD) - 1};

    Grams(const int64_t* keys, const int32_t* tokens, const uint8_t* chances, int64_t count) {
        slots_.resize(std::bit_ceil(uint64_t(count + count / 2 + 1)));
        for (int64_t i = 0; i < count; ++i) {
            Slot& slot = slots_[place(uint64_t(keys[i]))];
            slot.key = uint64_t(keys[i]), slot.used = 1;
            std::copy_n(tokens + i * FOLLOWERS, FOLLOWERS, slot.tokens);
            std::copy_n(chances + i * FOLLOWERS, FOLLOWERS, slot.chances);
        }
    }

    static uint64_t extended(uint64_t key, int32_t token) { return (key << WORD | uint64_t(int64_t(token) + 1)) & MASKS[0]; }

    void grow(Tree& out, uint64_t key, int most, double least, bool tree) const {
        std::priority_queue<Waiting<uint64_t>> waiting;
        double survival = 1.0;
        int count = 0;
        for (int at = -1; at + 1 < most;) {
            if (const Slot* slot = longest(key))
                for (int i = 0; i < FOLLOWERS; ++i) {
                    const double chance = std::min(slot->chances[i] / 255.0, 0.98);
                    if (survival * chance < least) break;
                    waiting.push({survival * chance, ++count, slot->tokens[i], at, 0, chance, key});
                }
            if (waiting.empty()) return;
            const auto next = taken(waiting, tree);
            at = out.add(next.token, next.parent, 0, next.confidence);
            survival = next.survival, key = extended(next.more, next.token);
        }
    }

private:
    struct Slot {
        uint64_t key = 0;
        int32_t tokens[FOLLOWERS] = {};
        uint8_t chances[FOLLOWERS] = {}, used = 0;
    };

    size_t place(uint64_t key) const {
        size_t at = (key * 0x9E3779B97F4A7C15u) >> 32;
        while (slots_[at &= slots_.size() - 1].used && slots_[at].key != key) ++at;
        return at;
    }

    const Slot* longest(uint64_t key) const {
        for (uint64_t mask : MASKS)
            if (const Slot& slot = slots_[place(key & mask)]; slot.used) return &slot;
        return nullptr;
    }

    std::vector<Slot> slots_;
};

// The union of two trees, each node with what it is worth.
class Join {
public:
    static constexpr int BINS = 13;

    explicit Join(const double* prior) : calibration(prior, 3 * 2 * BINS) {}

    // `merged` remembers what was said; `out` is the likeliest `most` nodes of it.
    void join(const Tree& first, const Tree& second, int most, bool tree, Tree& merged, Tree& out) {
        merged.clear();
        merge(first, 1, merged);
        merge(second, 2, merged);
        weigh(merged);
        const int n = merged.size();
        order_.resize(n), place_.assign(n, -1);
        for (int i = 0; i < n; ++i) order_[i] = i;
        std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return survival_[a] > survival_[b]; });
        for (int node : order_) {
            if (out.size() == most) break;
            const int32_t above = merged.parent[node];
            if (!tree && above != (out.size() ? last_ : -1)) continue;
            place_[node] = out.add(merged.token[node], above < 0 ? -1 : place_[above], 0, chance_[node]);
            out.sources.push_back(merged.sources[node]);
            last_ = node;
        }
    }

    Calibration calibration;

private:
    static constexpr double EDGES[] = {0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0};

    void merge(const Tree& tree, int bit, Tree& merged) {
        place_.resize(tree.size());
        for (int i = 0; i < tree.size(); ++i) {
            const int32_t above = tree.parent[i] < 0 ? -1 : place_[tree.parent[i]];
            int node = 0;
            while (node < merged.size() && (merged.parent[node] != above || merged.token[node] != tree.token[i])) ++node;
            place_[i] = node;
            if (node == merged.size()) {
                merged.add(tree.token[i], above, 0, tree.confidence[i]);
                merged.sources.push_back(bit);
            } else {
                merged.sources[node] |= bit;
                merged.confidence[node] = std::max(merged.confidence[node], tree.confidence[i]);
            }
        }
    }

    void weigh(Tree& merged) {
        chance_.clear(), survival_.clear();
        for (int i = 0; i < merged.size(); ++i) {
            double sure = merged.confidence[i];
            const int bin = int(std::upper_bound(EDGES, EDGES + BINS - 1, sure) - EDGES);
            const int32_t above = merged.parent[i];
            const int32_t cell = ((merged.sources[i] - 1) * 2 + (above >= 0)) * BINS + bin;
            sure = std::max(std::min(sure, 0.99), 0.01);
            const double middle = ((bin ? EDGES[bin - 1] : 0.0) + EDGES[bin]) / 2, chance = calibration.rate[cell];
            double holds = sure * chance * (1.0 - middle);
            holds /= holds + (1.0 - sure) * (1.0 - chance) * middle;
            merged.kind[i] = cell;
            chance_.push_back(holds);
            survival_.push_back(above >= 0 ? holds * survival_[above] : holds);
        }
    }

    std::vector<double> chance_, survival_;
    std::vector<int> order_, place_;
    int last_ = -1;
};

}  // namespace fr
