// How far guesses are believed for a row, and which are worth their toll: engine/drafters/{trust,choose}.py, number by number.
#pragma once

#include <numeric>
#include <optional>
#include <span>

#include "lookup.h"

namespace fr {

// A Gaussian estimate of a shift of the log-odds. `strain`: by how much the last outcomes together were off.
struct Shift {
    double mean, variance, strain = 0.0;

    void learn(double chance, bool held) {
        constexpr double STRAIN = 5.0, FADE = 0.75, STEP = 2.5, LET_GO = 3.0;
        const double off = held - chance, spread = chance * (1.0 - chance);
        strain = strain * FADE + std::min(std::max(off / std::sqrt(spread), -STEP), STEP);
        double before = variance;
        if (strain > STRAIN || strain < -STRAIN) strain = 0.0, before = LET_GO;
        variance = before / (1.0 + before * spread);
        mean += variance * off;
    }

    // An outcome for a shift that fades with each of them towards nothing.
    void follow(double chance, bool held, double keep, double prior) {
        const double before = prior + (variance - prior) * keep * keep;
        variance = before / (1.0 + before * chance * (1.0 - chance));
        mean = mean * keep + variance * (held - chance);
    }

    void fade(double keep, double towards, double prior) {
        mean = towards + (mean - towards) * keep;
        variance = prior + (variance - prior) * keep * keep;
    }
};

// What was offered to a row last and is not settled yet: the draft, the chance of each node, and how many tokens were known.
struct Offered {
    Tree draft;
    std::vector<double> chance;
    int64_t known = 0;
};

// The confidences of drafts, corrected by what became true of others.
class Trust {
public:
    // `own`: the shift of the draft's row, if it has one. Leaves the draft's chances in `chance`, their products in `survival`.
    void offer(const Tree& draft, const std::optional<Shift>& own, std::vector<double>& chance, std::vector<double>& survival) {
        const double shift = own ? own->mean : all_.mean;
        chance.clear(), survival.clear(), depth_.clear(), factors_.clear();
        for (int i = 0; i < draft.size(); ++i) {
            const int32_t above = draft.parent[i];
            const size_t depth = above < 0 ? 0 : size_t(depth_[above]) + 1;
            depth_.push_back(int(depth));
            while (depth >= factors_.size()) factors_.push_back(factor(shift + deep(factors_.size()).mean));
            const double sure = clamped(draft.confidence[i]), odds = sure / (1.0 - sure) * factors_[depth];
            chance.push_back(odds / (1.0 + odds));
            survival.push_back(above < 0 ? chance[i] : chance[i] * survival[above]);
        }
    }

    // What became of a draft: the tokens that followed its root.
    void settle(Offered& offered, std::optional<Shift>& own, std::span<const int32_t> truth) {
        const Tree& draft = offered.draft;
        if (!draft.size()) return;
        if (!own) own = Shift{all_.mean, ROWS};
        own->fade(0.98, all_.mean, ROWS);
        depth_.assign(size_t(draft.size()), -1);
        for (int i = 0; i < draft.size(); ++i) {
            const int depth = draft.parent[i] < 0 ? 0 : depth_[draft.parent[i]];
            if (depth < 0 || size_t(depth) >= truth.size()) continue;
            const bool held = draft.token[i] == truth[size_t(depth)];
            if (held) depth_[i] = depth + 1;
            Shift& below = deep(size_t(depth));
            const double chance = offered.chance[i];
            own->learn(chance, held);
            all_.follow(shifted(draft.confidence[i], all_.mean * ALL_FADE + below.mean), held, ALL_FADE, ALL);
            below.follow(chance, held, 0.999, DEPTH);
        }
        offered.draft.clear();
    }

private:
    static constexpr double ROWS = 0.3, ALL = 2.0, ALL_FADE = 0.998, ALL_FIRST = -1.5, DEPTH = 0.1;
    static constexpr size_t DEPTHS = 8;

    static double clamped(double confidence) { return std::min(std::max(confidence, 0.01), 0.99); }
    static double factor(double shift) { return std::exp(std::max(-12.0, std::min(12.0, shift))); }
    static double shifted(double confidence, double shift) {
        const double sure = clamped(confidence), odds = sure / (1.0 - sure) * factor(shift);
        return odds / (1.0 + odds);
    }
    Shift& deep(size_t depth) { return depths_[std::min(depth, DEPTHS - 1)]; }

    Shift all_{ALL_FIRST, ALL};
    Shift depths_[DEPTHS] = {{0.0, DEPTH}, {0.0, DEPTH}, {0.0, DEPTH}, {0.0, DEPTH}, {0.0, DEPTH}, {0.0, DEPTH}, {0.0, DEPTH}, {0.0, DEPTH}};
    std::vector<double> factors_;
    std::vector<int> depth_;
};

// The part of a tree that a row has room for: so many levels, tokens below `vocab`.
inline void prune(Tree& tree, int depths, int32_t vocab) {
    std::vector<int32_t> place(size_t(tree.size()), -1);
    std::vector<int> depth(size_t(tree.size()), 0);
    int kept = 0;
    for (int i = 0; i < tree.size(); ++i) {
        const int32_t above = tree.parent[i];
        depth[i] = above < 0 ? 1 : depth[above] + 1;
        if ((above >= 0 && place[above] < 0) || depth[i] > depths || tree.token[i] < 0 || tree.token[i] >= vocab) continue;
        place[i] = kept;
        tree.move(i, kept++, above < 0 ? -1 : place[above]);
    }
    tree.cut(kept);
}

// Which nodes of all drafts together are worth their toll.
class Choice {
public:
    std::vector<double> worth;

    // The places of those that are kept, ascending. `toll[n]`: what n + 1 nodes have to bring.
    const std::vector<int>& choose(std::span<const double> toll, double discount) {
        order_.resize(worth.size());
        std::iota(order_.begin(), order_.end(), 0);
        std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return worth[a] > worth[b]; });
        size_t kept = count(toll, 1.0);
        if (!kept && discount < 1.0) kept = count(toll, discount);
        order_.resize(kept);
        std::sort(order_.begin(), order_.end());
        return order_;
    }

private:
    size_t count(std::span<const double> toll, double discount) const {
        double total = 0.0, best = 0.0;
        size_t kept = 0;
        for (size_t n = 0; n < std::min(order_.size(), toll.size()); ++n) {
            total += worth[order_[n]];
            const double over = total - toll[n] * discount;
            if (over > best) best = over, kept = n + 1;
        }
        return kept;
    }

    std::vector<int> order_;
};

}  // namespace fr
