/* The interface of look-ups: guesses from texts and tables, for all rows of a step in one call.
 *
 * What is told and asked is a tape of 32-bit words, read in order. engine/drafters/lookups.py writes it, and what it means is what the
 * drafters there do that are written in Python.
 *
 *   FR_BEGIN    row prompt tokens n scope…   a row begins (anew): so many of its tokens are its client's, so many are expected soon; answers
 *                                            are shared among rows of equal scope
 *   FR_TELL     row n token…                 what became true of it; nothing, where it is not known
 *   FR_FORGET   row
 *   FR_PROPOSE  row most                     at most so many guesses, please
 *   FR_COMPETE  n vocab weighed [row most depth]…   the same of n different rows, as deep and with tokens as there is room for, and of all these
 *                                            guesses those that are worth their toll; the last words of a tape
 *
 * An answer to FR_PROPOSE, in the order in which they are asked: in `nodes` n, n tokens, n parents (−1 = the root) and, where there is a table,
 * n sources (bits; 1 = texts, 2 = the table); in `confidences` n numbers. Three words for each guess asked for and one for each row are
 * enough, and a question for whose guesses there are fewer is refused. Prompt, tokens, n, token and most are never negative.
 * To FR_COMPETE: in `nodes` how many are kept of all, k, and nothing else where that is none; then for each row how many are its; then k tokens,
 * k parents within their rows, k sources; in `confidences` for each row how many of its guesses are expected to hold, then k numbers. How far
 * confidences are believed is learned here, from such questions alone.
 */
#ifndef FORERUN_LOOKUP_H
#define FORERUN_LOOKUP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FR_BEGIN, FR_TELL, FR_FORGET, FR_PROPOSE, FR_COMPETE };

/* `tree`: siblings are wanted. `shared`: answers of rows that have ended are remembered for others. The most tokens that are remembered of a
 * row, and of others' answers in each of so many scopes. `rates`: prior of the 240 kinds of guesses from texts. A table of `contexts` keys,
 * or −1 = no table; [contexts, 4] tokens and chances (of 255), what follows each. `joint`: prior of the 78 kinds of guesses of both together. */
typedef struct {
    int32_t tree, shared, most_grams, scopes;
    int64_t own_tokens, shared_tokens, contexts;
    const double *rates, *joint;
    const int64_t* keys;
    const int32_t* tokens;
    const uint8_t* chances;
} fr_sources;

typedef struct fr_lookup fr_lookup;

/* Copies what it needs. Null: out of memory. */
fr_lookup* fr_lookup_open(const fr_sources* sources);
void fr_lookup_close(fr_lookup* lookup);
/* Plays a tape. `terms`, three or more: survival of a node below which it is not mentioned; of guesses that compete, what each costs for every token
 * of its row, and by what tolls are multiplied where none would be kept otherwise; if they are weighed, what a token of each row is worth; toll[i],
 * what i + 1 guesses have to bring. `words`, `numbers`: room in `nodes` and `confidences`. 0, or 1: the tape makes no sense from some place on, or
 * 2: out of memory; then all that was told is forgotten, and rows have to begin anew. */
int32_t fr_lookup_run(fr_lookup* lookup, const int32_t* tape, int64_t length, const double* terms, int64_t count, int32_t* nodes,
                      int64_t words, double* confidences, int64_t numbers);

#ifdef __cplusplus
}
#endif
#endif
