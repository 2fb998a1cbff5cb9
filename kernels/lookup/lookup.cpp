// Rows of look-ups, and the tape that is played to them.
#include "lookup.h"

#include <list>
#include <memory>
#include <new>
#include <unordered_map>

#include "forerun_lookup.h"

namespace fr {
namespace {

constexpr int KINDS = 240;
constexpr size_t MATCHES = 3;
constexpr int SURE = 3;

// What is known of a row, and what was said of it last and not settled yet.
struct Row {
    Row(int64_t most, int64_t size, int64_t prompt, std::u32string scope) : history(most, size), prompt(prompt), scope(std::move(scope)) {}

    History history;
    int64_t prompt;
    std::u32string scope;
    uint64_t context = 0;
    Tree guessed, joined;
};

struct Scope {
    std::u32string name;
    History history;
};

}  // namespace
}  // namespace fr

struct fr_lookup {
    explicit fr_lookup(const fr_sources& s)
        : sources_(s), texts_(s.rates, fr::KINDS), grams_(s.keys, s.tokens, s.chances, s.contexts), join_(s.joint) {}

    void begin(int32_t number, int32_t prompt, int32_t tokens, std::u32string scope) {
        rows_[number] = std::make_unique<fr::Row>(sources_.own_tokens, 2 * int64_t(tokens), prompt, std::move(scope));
    }

    bool tell(int32_t number, const int32_t* tokens, int64_t count) {
        const auto found = rows_.find(number);
        if (found == rows_.end()) return false;
        fr::Row& row = *found->second;
        texts_.settle(row.guessed, tokens, count);
        join_.calibration.settle(row.joined, tokens, count);
        row.history.extend(tokens, count);
        for (int64_t i = std::max<int64_t>(0, count - 3); i < count; ++i) row.context = fr::Grams::extended(row.context, tokens[i]);
        return true;
    }

    void forget(int32_t number) {
        const auto found = rows_.find(number);
        if (found == rows_.end()) return;
        if (sources_.shared) share(*found->second);
        rows_.erase(found);
    }

    const fr::Tree& propose(int32_t number, int most, double least) {
        out_.clear(), extra_.clear();
        const auto found = rows_.find(number);
        if (found == rows_.end() || most < 1) return out_;
        fr::Row& row = *found->second;
        if (!sources_.contexts) return texts(row, most, least) ? row.guessed : out_;
        const bool some = texts(row, most, least);
        grams_.grow(extra_, row.context, std::min(most, sources_.most_grams), least, sources_.tree);
        join_.join(some ? row.guessed : none_, extra_, most, sources_.tree, row.joined, out_);
        return out_;
    }

private:
    // Leaves what texts say in `row.guessed`, if they say something.
    bool texts(fr::Row& row, int most, double least) {
        matches_.clear();
        row.history.find(row.history.tokens, fr::MATCHES, 0, matches_);
        if (matches_.empty() || matches_[0].length < fr::SURE)
            for (const fr::Scope& scope : scopes_)
                if (scope.name == row.scope) scope.history.find(row.history.tokens, fr::MATCHES, 1, matches_);
        if (matches_.empty()) return false;
        row.guessed.clear();
        fr::Spanned(matches_, texts_.rate).grow(row.guessed, most, least, sources_.tree);
        return true;
    }

    // The scope that was written to longest ago makes room.
    void share(const fr::Row& row) {
        const std::vector<int32_t> answer = row.history.since(row.prompt);
        if (answer.size() < 2) return;
        auto at = std::find_if(scopes_.begin(), scopes_.end(), [&](const fr::Scope& scope) { return scope.name == row.scope; });
        if (at == scopes_.end()) {
            scopes_.push_back({row.scope, fr::History(sources_.shared_tokens, sources_.shared_tokens / 2)});
            if (int64_t(scopes_.size()) > sources_.scopes) scopes_.pop_front();
        } else {
            scopes_.splice(scopes_.end(), scopes_, at);
        }
        std::vector<int32_t> told{fr::GAP};
        told.insert(told.end(), answer.begin(), answer.end());
        scopes_.back().history.extend(told.data(), int64_t(told.size()));
    }

    const fr_sources sources_;
    fr::Calibration texts_;
    const fr::Grams grams_;
    fr::Join join_;
    std::unordered_map<int32_t, std::unique_ptr<fr::Row>> rows_;
    std::list<fr::Scope> scopes_;
    std::vector<fr::Match> matches_;
    fr::Tree extra_, out_;
    const fr::Tree none_;
};

namespace {

// Reads words until there are none; `ok` when all there was to read was there.
struct Tape {
    const int32_t *at, *end;
    bool ok = true;

    int32_t word() { return (ok = ok && at < end) ? *at++ : 0; }
    const int32_t* words(int64_t n) {
        ok = ok && n >= 0 && n <= end - at;
        const int32_t* first = at;
        at += ok ? n : 0;
        return first;
    }
};

bool play(fr_lookup& lookup, Tape tape, double least, int32_t* nodes, double* confidences) {
    while (tape.ok && tape.at < tape.end) {
        const int32_t code = tape.word(), row = tape.word();
        if (code == FR_BEGIN) {
            const int32_t prompt = tape.word(), tokens = tape.word(), n = tape.word();
            const int32_t* scope = tape.words(n);
            if (tape.ok) lookup.begin(row, prompt, tokens, {scope, scope + n});
        } else if (code == FR_TELL) {
            const int32_t n = tape.word();
            const int32_t* tokens = tape.words(n);
            tape.ok = tape.ok && lookup.tell(row, tokens, n);
        } else if (code == FR_FORGET && tape.ok) {
            lookup.forget(row);
        } else if (code == FR_PROPOSE) {
            const int32_t most = tape.word();
            if (!tape.ok) break;
            const fr::Tree& tree = lookup.propose(row, most, least);
            *nodes++ = tree.size();
            for (const auto* part : {&tree.token, &tree.parent, &tree.sources}) nodes = std::copy(part->begin(), part->end(), nodes);
            confidences = std::copy(tree.confidence.begin(), tree.confidence.end(), confidences);
        } else {
            return false;
        }
    }
    return tape.ok;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) fr_lookup* fr_lookup_open(const fr_sources* sources) {
    try {
        return new fr_lookup(*sources);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

__attribute__((visibility("default"))) void fr_lookup_close(fr_lookup* lookup) { delete lookup; }

__attribute__((visibility("default"))) int32_t fr_lookup_run(fr_lookup* lookup, const int32_t* tape, int64_t length, double least,
                                                             int32_t* nodes, double* confidences) {
    try {
        return play(*lookup, {tape, tape + length}, least, nodes, confidences) ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}
}
