// Rows of look-ups, and the tape that is played to them.
#include <list>
#include <memory>
#include <unordered_map>

#include "forerun_lookup.h"
#include "trust.h"

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
    std::optional<Shift> shift;
    Offered offered;
    int64_t asked = 0;
};

struct Scope {
    std::u32string name;
    History history;
};

}  // namespace
}  // namespace fr

struct fr_lookup {
    explicit fr_lookup(const fr_sources& s)
        : tree_(s.tree),
          shares_(s.shared),
          joined_(s.contexts >= 0),
          most_grams_(s.most_grams),
          most_scopes_(s.scopes),
          own_tokens_(s.own_tokens),
          shared_tokens_(s.shared_tokens),
          texts_(s.rates, fr::KINDS),
          grams_(s.keys, s.tokens, s.chances, std::max<int64_t>(0, s.contexts)),
          join_(s.joint) {}

    void begin(int32_t number, int32_t prompt, int32_t tokens, std::u32string scope) {
        rows_[number] = std::make_unique<fr::Row>(own_tokens_, 2 * int64_t(tokens), prompt, std::move(scope));
    }

    // Of a row that is not known (any more), nothing is kept: it would be a text with a hole in it.
    void tell(int32_t number, const int32_t* tokens, int64_t count) {
        const auto found = rows_.find(number);
        if (found == rows_.end()) return;
        fr::Row& row = *found->second;
        texts_.settle(row.guessed, tokens, count);
        join_.calibration.settle(row.joined, tokens, count);
        row.history.extend(tokens, count);
        for (int64_t i = std::max<int64_t>(0, count - 3); i < count; ++i) row.context = fr::Grams::extended(row.context, tokens[i]);
    }

    void forget(int32_t number) {
        const auto found = rows_.find(number);
        if (found == rows_.end()) return;
        if (shares_) share(*found->second);
        rows_.erase(found);
    }

    const fr::Tree& propose(int32_t number, int most, double least) {
        out_.clear(), extra_.clear();
        const auto found = rows_.find(number);
        if (found == rows_.end() || most < 1) return out_;
        fr::Row& row = *found->second;
        if (!joined_) return texts(row, most, least) ? row.guessed : out_;
        const bool some = texts(row, most, least);
        grams_.grow(extra_, row.context, std::min(most, most_grams_), least, tree_);
        join_.join(some ? row.guessed : none_, extra_, most, tree_, row.joined, out_);
        return out_;
    }

    // A question about rows whose drafts compete begins; nothing else is told or asked before `choose`.
    void compete() {
        ++round_;
        offers_.clear(), choice_.worth.clear(), survival_.clear();
    }

    // The draft of a row as far as it has room: levels, tokens below `vocab`. `weight`: what a token of it is worth; `entry`: what each node costs
    // for every token that is known of it. Whether it was not asked about in this question already.
    bool offer(int32_t number, int most, int depths, int32_t vocab, double least, double weight, double entry) {
        const auto found = rows_.find(number);
        fr::Row* row = found == rows_.end() ? nullptr : found->second.get();
        offers_.push_back({row, int(survival_.size())});
        if (!row) return true;
        if (row->asked == round_) return false;
        row->asked = round_;
        fr::Offered& offered = row->offered;
        trust_.settle(offered, row->shift, row->history.behind(offered.known));
        offered.draft = propose(number, most, least);
        fr::prune(offered.draft, depths, vocab);
        offered.known = row->history.told();
        trust_.offer(offered.draft, row->shift, offered.chance, chances_);
        for (const double survival : chances_) {
            survival_.push_back(survival);
            choice_.worth.push_back(weight * survival - entry * double(offered.known));
        }
        return true;
    }

    // Which nodes of all offers are worth it: n of them; for each offer how many of them are its, and how many of those are expected to hold; of
    // all, one row after the other, tokens, parents, sources, and confidences.
    void choose(std::span<const double> toll, double discount, int32_t* nodes, double* confidences) {
        const std::vector<int>& kept = choice_.choose(toll, discount);
        const int64_t n = int64_t(kept.size()), rows = int64_t(offers_.size());
        *nodes++ = int32_t(n);
        if (!n) return;
        int32_t *token = nodes + rows, *parent = token + n, *source = parent + n;
        double* confidence = confidences + rows;
        auto at = kept.begin();
        for (int64_t i = 0; i < rows; ++i) {
            const int first = offers_[i].first, last = i + 1 < rows ? offers_[i + 1].first : int(survival_.size());
            place_.assign(size_t(last - first), -1);
            int32_t count = 0;
            double expected = 0.0;
            for (; at != kept.end() && *at < last; ++at) {
                const fr::Tree& draft = offers_[i].row->offered.draft;
                const int node = *at - first;
                expected += survival_[*at];
                *token++ = draft.token[node];
                *parent++ = draft.parent[node] < 0 ? -1 : place_[draft.parent[node]];
                if (joined_) *source++ = draft.sources[node];
                *confidence++ = draft.confidence[node];
                place_[node] = count++;
            }
            nodes[i] = count, confidences[i] = expected;
        }
    }

    // Nobody knows what became of rows and texts in a failure. How often guesses hold is still true.
    void clear() {
        rows_.clear();
        scopes_.clear();
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
        fr::Spanned(matches_, texts_.rate).grow(row.guessed, most, least, tree_);
        return true;
    }

    // The scope that was written to longest ago makes room.
    void share(const fr::Row& row) {
        const std::vector<int32_t> answer = row.history.since(row.prompt);
        if (answer.size() < 2) return;
        auto at = std::find_if(scopes_.begin(), scopes_.end(), [&](const fr::Scope& scope) { return scope.name == row.scope; });
        if (at == scopes_.end()) {
            scopes_.push_back({row.scope, fr::History(shared_tokens_, shared_tokens_ / 2)});
            if (int64_t(scopes_.size()) > most_scopes_) scopes_.pop_front();
        } else {
            scopes_.splice(scopes_.end(), scopes_, at);
        }
        std::vector<int32_t> told{fr::GAP};
        told.insert(told.end(), answer.begin(), answer.end());
        scopes_.back().history.extend(told.data(), int64_t(told.size()));
    }

    const bool tree_, shares_, joined_;
    const int most_grams_, most_scopes_;
    const int64_t own_tokens_, shared_tokens_;
    fr::Calibration texts_;
    const fr::Grams grams_;
    fr::Join join_;
    std::unordered_map<int32_t, std::unique_ptr<fr::Row>> rows_;
    std::list<fr::Scope> scopes_;
    std::vector<fr::Match> matches_;
    fr::Tree extra_, out_;
    const fr::Tree none_;
    fr::Trust trust_;
    fr::Choice choice_;
    struct Offer {
        fr::Row* row;
        int first;
    };
    std::vector<Offer> offers_;
    std::vector<double> survival_, chances_;
    std::vector<int32_t> place_;
    int64_t round_ = 0;
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

bool negative(int32_t word) { return word < 0; }

// Where answers go, and how many words and numbers there is room for.
struct Answers {
    int32_t* nodes;
    double* confidences;
    int64_t words, numbers;

    bool fit(int64_t most) const { return 3 * most < words && most <= numbers; }
    void add(const fr::Tree& tree) {
        int32_t* end = nodes;
        *end++ = tree.size();
        for (const auto* part : {&tree.token, &tree.parent, &tree.sources}) end = std::copy(part->begin(), part->end(), end);
        words -= end - nodes, numbers -= tree.size();
        nodes = end;
        confidences = std::copy(tree.confidence.begin(), tree.confidence.end(), confidences);
    }
};

// What guesses have to bring: `fr_lookup_run`.
struct Terms {
    double least, entry, discount;
    std::span<const double> behind;
};

bool compete(fr_lookup& lookup, Tape& tape, const Terms& terms, Answers& answers) {
    const int32_t n = tape.word(), vocab = tape.word(), weighed = tape.word();
    const int32_t* asked = tape.words(3 * int64_t(n));
    if (!tape.ok || size_t(weighed ? n : 0) > terms.behind.size()) return false;
    const std::span<const double> toll = terms.behind.subspan(weighed ? n : 0);
    int64_t most = 0;
    for (int32_t i = 0; i < n; ++i) most += std::max(0, asked[3 * i + 1]);
    most = std::min(most, int64_t(toll.size()));
    if (answers.words < 1 + n + 3 * most || answers.numbers < n + most) return false;
    lookup.compete();
    for (int32_t i = 0; i < n; ++i)
        if (!lookup.offer(asked[3 * i], asked[3 * i + 1], asked[3 * i + 2], vocab, terms.least, weighed ? terms.behind[i] : 1.0, terms.entry))
            return false;
    lookup.choose(toll, terms.discount, answers.nodes, answers.confidences);
    return true;
}

bool play(fr_lookup& lookup, Tape tape, const Terms& terms, Answers answers) {
    while (tape.ok && tape.at < tape.end) {
        const int32_t code = tape.word();
        if (code == FR_COMPETE) return compete(lookup, tape, terms, answers) && tape.at == tape.end;
        const int32_t row = tape.word();
        if (code == FR_BEGIN) {
            const int32_t prompt = tape.word(), tokens = tape.word(), n = tape.word();
            const int32_t* scope = tape.words(n);
            if (!tape.ok || prompt < 0 || tokens < 0) return false;
            lookup.begin(row, prompt, tokens, {scope, scope + n});
        } else if (code == FR_TELL) {
            const int32_t n = tape.word();
            const int32_t* tokens = tape.words(n);
            // A text has no gaps in it: looking back stops at the one before it.
            if (!tape.ok || std::any_of(tokens, tokens + n, negative)) return false;
            lookup.tell(row, tokens, n);
        } else if (code == FR_FORGET && tape.ok) {
            lookup.forget(row);
        } else if (code == FR_PROPOSE) {
            const int32_t most = std::max(0, tape.word());
            if (!tape.ok || !answers.fit(most)) return false;
            answers.add(lookup.propose(row, most, terms.least));
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
    } catch (...) {
        return nullptr;
    }
}

__attribute__((visibility("default"))) void fr_lookup_close(fr_lookup* lookup) { delete lookup; }

__attribute__((visibility("default"))) int32_t fr_lookup_run(fr_lookup* lookup, const int32_t* tape, int64_t length, const double* terms,
                                                             int64_t count, int32_t* nodes, int64_t words, double* confidences, int64_t numbers) {
    int32_t fault = count < 3 ? 1 : 2;
    try {
        if (count >= 3) {
            const Terms given{terms[0], terms[1], terms[2], {terms + 3, size_t(count - 3)}};
            fault = play(*lookup, {tape, tape + length}, given, {nodes, confidences, words, numbers}) ? 0 : 1;
        }
    } catch (...) {
    }
    if (fault) lookup->clear();
    return fault;
}
}
