// Plays random lives of rows, and tapes that are damaged, for sanitizers to watch: every buffer is exactly as large as it is said to be. A
// tape that makes sense is played to its end, and its answers are trees; of one that makes none, nothing is asked but that it harms nobody.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "forerun_lookup.h"

namespace {

std::mt19937 dice(1);
int failures = 0;

int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(dice); }

void expect(bool holds, const char* what) {
    if (!holds) std::printf("failed: %s\n", what), ++failures;
}

// What a call may touch, and nothing beside it.
template <class T>
struct Exact {
    explicit Exact(const std::vector<T>& from) : size(int64_t(from.size())), at(new T[from.size()]) {
        std::copy(from.begin(), from.end(), at.get());
    }

    int64_t size;
    std::unique_ptr<T[]> at;
};

struct Life {
    Life() : vocab(draw(2, 40)), table(draw(0, 3)) {
        std::set<int64_t> keys;
        for (int i = table ? draw(0, 200) : 0; i > 0; --i) {
            int64_t key = 0;
            for (int n = draw(1, 3); n; --n) key = key << 21 | (draw(0, vocab - 1) + 1);
            keys.insert(key);
        }
        std::vector<int32_t> tokens;
        std::vector<uint8_t> chances;
        for (size_t i = 0; i < 4 * keys.size(); ++i)
            tokens.push_back(draw(0, vocab - 1)), chances.push_back(uint8_t(draw(0, 255) / (i % 4 + 1)));
        const Exact<double> rates(std::vector<double>(240, 0.5)), joint(std::vector<double>(78, 0.4));
        const Exact<int64_t> at({keys.begin(), keys.end()});
        const Exact<int32_t> followers(tokens);
        const Exact<uint8_t> likely(chances);
        const int64_t own = draw(0, 1) ? 16 : 1 << 15, shared = draw(0, 1) ? 16 : 1 << 10;
        const fr_sources sources{draw(0, 1), draw(0, 3), draw(1, 8),          draw(1, 3),   own,           shared,
                                 table ? at.size : -1, rates.at.get(), joint.at.get(), at.at.get(), followers.at.get(), likely.at.get()};
        lookup = fr_lookup_open(&sources);
    }
    ~Life() { fr_lookup_close(lookup); }

    void text(std::vector<int32_t>& tape, int row, int n) {
        tape.insert(tape.end(), {FR_TELL, row, n});
        for (int i = 0; i < n; ++i) tape.push_back(gaps && !draw(0, 7) ? -1 : draw(0, 9) ? draw(0, vocab - 1) : draw(0, 1) ? INT32_MAX : 0);
    }

    // A question about some rows whose drafts compete.
    void compete(std::vector<int32_t>& tape, std::vector<int>& asked) {
        const int first = draw(0, 4), rows = draw(0, 5 - first);
        weighed = draw(0, 1);
        tape.insert(tape.end(), {FR_COMPETE, rows, draw(1, vocab), weighed});
        for (int row = first; row < first + rows; ++row) {
            asked.push_back(draw(0, 16));
            tape.insert(tape.end(), {row, asked.back(), draw(0, 16)});
        }
    }

    // Words that make sense, and the most guesses of each question among them.
    std::vector<int32_t> tape(std::vector<int>& asked) {
        std::vector<int32_t> tape;
        for (int i = draw(1, 20); i; --i) {
            const int row = draw(0, 4), what = draw(0, 9);
            if (what == 0) {
                tape.insert(tape.end(), {FR_BEGIN, row, draw(0, 20), draw(0, 2000), 1, draw(0, 4)});
                text(tape, row, draw(0, 3) ? draw(0, 20) : draw(300, 2000));
            } else if (what == 1) {
                tape.insert(tape.end(), {FR_FORGET, row});
            } else if (what < 5) {
                text(tape, row, draw(0, 4));
            } else if (!competing) {
                asked.push_back(draw(0, 16));
                tape.insert(tape.end(), {FR_PROPOSE, row, asked.back()});
            }
        }
        if (competing) compete(tape, asked);
        return tape;
    }

    int play(const std::vector<int32_t>& words, Exact<int32_t>& nodes, Exact<double>& confidences) {
        const Exact<int32_t> exact(words);
        const Exact<double> given(terms);
        return fr_lookup_run(lookup, exact.at.get(), exact.size, given.at.get(), given.size, nodes.at.get(), nodes.size,
                             confidences.at.get(), confidences.size);
    }

    // Of a question about so many rows, or one that has too few.
    void price(size_t rows, bool damaged) {
        terms = {draw(1, 50) / 100.0, draw(0, 1) * 1e-4, draw(0, 1) ? 1.0 : 0.5};
        tolls = competing ? draw(0, 20) : 0;
        for (size_t i = 0; competing && weighed && i < rows; ++i) terms.push_back(draw(1, 16) / 4.0);
        const double step = draw(0, 5) / 100.0;
        for (int i = 0; i < tolls; ++i) terms.push_back(step * (i + 1));
        if (damaged && !draw(0, 3)) terms.resize(size_t(draw(0, int(terms.size()))));
    }

    void step(bool damaged) {
        std::vector<int> asked;
        gaps = damaged && draw(0, 1);
        competing = draw(0, 1);
        std::vector<int32_t> words = tape(asked);
        int64_t most = 0;
        for (int n : asked) most += n;
        price(asked.size(), damaged);
        const int64_t answered = competing ? std::min(most, int64_t(tolls)) : most;
        const size_t rows = asked.size();
        if (damaged) {
            const int32_t strange[] = {-1, INT32_MIN, INT32_MAX, draw(FR_PROPOSE, FR_COMPETE), 1 << 20, draw(0, 40)};
            for (int i = draw(0, 3); i; --i) words[size_t(draw(0, int(words.size()) - 1))] = strange[draw(0, 5)];
            if (draw(0, 1)) words.resize(size_t(draw(0, int(words.size()))));
        }
        const int64_t room = damaged && draw(0, 1) ? draw(0, int(answered)) : answered;
        Exact<int32_t> nodes(std::vector<int32_t>(size_t(3 * room) + rows + competing));
        Exact<double> confidences{std::vector<double>(size_t(room) + (competing ? rows : 0))};
        const int fault = play(words, nodes, confidences);
        expect(fault == 0 || (damaged && fault == 1), "a tape that makes sense is played");
        if (damaged) return;
        if (competing)
            best(asked, nodes.at.get(), confidences.at.get());
        else
            trees(asked, nodes.at.get(), confidences.at.get());
    }

    void best(const std::vector<int>& asked, const int32_t* nodes, const double* confidences) {
        const int64_t rows = int64_t(asked.size()), all = nodes[0];
        expect(0 <= all && all <= tolls, "no more than there are tolls for");
        const int32_t *count = nodes + 1, *token = count + rows, *parent = token + all;
        for (int64_t i = 0, first = 0; all && i < rows; first += count[i++]) {
            expect(0 <= count[i] && count[i] <= asked[size_t(i)] && first + count[i] <= all, "no more guesses than were asked for");
            expect(0.0 <= confidences[i] && confidences[i] <= count[i] + 1e-9, "no more hold than there are");
            for (int64_t n = first; n < first + count[i]; ++n)
                expect(token[n] >= 0 && token[n] < vocab && -1 <= parent[n] && parent[n] < n - first, "a tree");
        }
        kept += all;
    }

    void trees(const std::vector<int>& asked, const int32_t* nodes, const double* confidences) {
        for (int most : asked) {
            const int n = *nodes++;
            expect(0 <= n && n <= most, "no more guesses than were asked for");
            for (int i = 0; i < n; ++i) {
                expect(nodes[i] >= 0 && -1 <= nodes[n + i] && nodes[n + i] < i, "a tree");
                expect(0.0 < confidences[i] && confidences[i] <= 1.0, "a chance");
            }
            guesses += n, nodes += (table ? 3 : 2) * n, confidences += n;
        }
    }

    const int vocab, table;
    fr_lookup* lookup;
    bool gaps = false, competing = false;
    int weighed = 0, tolls = 0;
    std::vector<double> terms;
    int64_t guesses = 0, kept = 0;
};

}  // namespace

int main() {
    int64_t guesses = 0, kept = 0;
    for (int i = 0; i < 100 && !failures; ++i) {
        Life life;
        for (int n = 0; n < 200; ++n) life.step(false);
        for (int n = 0; n < 100; ++n) life.step(n % 2);
        guesses += life.guesses, kept += life.kept;
    }
    expect(guesses > 30000 && kept > 2000, "there were guesses");
    std::printf("%lld guesses, %lld kept: %d failures\n", static_cast<long long>(guesses), static_cast<long long>(kept), failures);
    return failures != 0;
}
