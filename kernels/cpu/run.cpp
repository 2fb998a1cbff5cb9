// Runs programs: reads an op, cuts its work into tasks, hands them to the pool.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>
#include <vector>

#include "forerun_cpu.h"
#include "forms.h"
#include "kernels.h"
#include "pool.h"

namespace fr {

namespace {

// Memory that grows and is never zeroed; aligned to a cache line.
class Buffer {
public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    ~Buffer() { free(data_); }
    template <class T>
    T* room(size_t count) {
        const size_t bytes = count * sizeof(T);
        if (bytes > size_) {
            free(data_);
            size_ = 0;
            data_ = aligned_alloc(64, (bytes + bytes / 4 + 63) / 64 * 64);
            if (!data_) throw std::bad_alloc();
            size_ = bytes;
        }
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

constexpr int64_t WORTH_SHARING = 16384;  // elements of a row-wise op, multiplications / 16 of a product: below, waking a thread costs more
constexpr int64_t WORTH_PACKING = 8192;   // elements of rows that a product packs, and most often makes as well
constexpr int32_t TASKS = 9;     // of a product, for each thread: fewer leave it waiting for the last one, more cut the stream of weights
constexpr int32_t STREAM = 16;  // where few rows take weights as memory gives them, tasks have at least so many panels
constexpr size_t ROWS_TOGETHER = 384 << 10;  // bytes of packed rows that pass over a panel while it is in cache, and stay in a 1 MiB L2
constexpr int32_t FEW_ROWS = 2;              // of an attention task
constexpr int32_t LEAST_ROWS = 4, EVEN = 3;  // of a task, where it is cut for want of so many tasks for each thread
constexpr int32_t READ_ROWS = 20;             // of floats or bf16: so few leave memory no time for more than weights
constexpr size_t NEAR = 4 << 20;            // bytes of a weight that caches hold, so that it may be read again for every few rows
constexpr int32_t GATED_PANELS = 2;          // of gate and up, whose sums are in a core's cache together, at least
constexpr size_t EXPECTED = 128 << 10;       // bytes of the next product's weights that a waiting thread fetches, at most

// How a product is cut into tasks: `groups` of row tiles times `chunks` of panels, of which `grain` are never parted. Where rows alone make
// enough tasks and the weight is near, a task has all columns: it packs its own rows, and writes whole rows of the result.
//
// Few rows make few tasks. Where threads would not have equally many panels, what is left over (`rest` panels) is cut by row tiles instead.
struct Cut {
    int32_t panels, grain, chunks, groups;
    bool shared;
    int32_t rest = 0;
    bool by_rows() const { return shared && chunks == 1; }
    int32_t begin(int32_t chunk) const { return std::min(panels, (panels + grain - 1) / grain * chunk / chunks * grain); }
};

// Columns of gate and up together, as they are packed.
int32_t both(int32_t F) { return (F + HALF - 1) / HALF * PANEL; }

int32_t first_row(const Product& p, int32_t tile) { return int32_t(int64_t(p.rows) * tile / p.tiles); }

}  // namespace
}  // namespace fr

using namespace fr;

struct fr_context {
    fr_context(int threads, const Kernels* kernels) : k(kernels), pool(threads), scratch(size_t(threads)) {}

    const Kernels* k;
    const bool crossing = adds_beside_dots(), unasked = prefetches_alone();
    Pool pool;
    Buffer packed, parts;
    std::vector<Buffer> scratch;  // one a thread
    Buffer moe_rows, moe_wide, moe_gated, moe_out, moe_route, kept, gated;
    std::vector<AttentionTask> tasks;
    std::vector<int32_t> told;  // each thread, which of them most likely comes next
    std::vector<std::pair<int32_t, float>> picked;  // of one expert: row, weight

    // Pages that the attention `reader` will read, of which some are given to products before it to fetch.
    const fr_op* reader = nullptr;
    std::vector<const char*> pages;
    size_t given = 0;
};

namespace {

// A packed weight of an op.
struct Matrix {
    const void* data;
    int32_t K, N, format;
};

// One op with its operands resolved.
class Call {
public:
    // `left`: how many ops there are from this one on.
    Call(fr_context& context, const fr_op* op, int32_t left, void* const* table, const int32_t* sizes)
        : c_(context), k_(*context.k), op_(*op), left_(left), table_(table), sizes_(sizes), rows_(sizes[op->rows]) {}

    // `done`: how many ops were done in one.
    int32_t run(int32_t& done);

private:
    int32_t run();

    template <class T = float>
    T* t(int at) const {
        return op_.t[at] < 0 ? nullptr : static_cast<T*>(table_[op_.t[at]]);
    }
    // The op that comes so many places later.
    Call later(int32_t places) const { return {c_, &op_ + places, left_ - places, table_, sizes_}; }
    int32_t i(int at) const { return op_.i[at]; }
    float f(int at) const { return op_.f[at]; }

    // Whether 0 ≤ values[j] < end for all of them.
    static bool within(const int32_t* values, int64_t count, int64_t end) {
        return std::all_of(values, values + count, [&](int32_t v) { return v >= 0 && v < end; });
    }

    // f(begin, end) over 0 … count: one by one in parallel, or all at once.
    template <class F>
    void by_parts(int32_t count, bool shared, F&& work) {
        if (!shared || count == 1) return work(0, count);
        c_.pool.run(count, [&](int32_t part, int32_t) { work(part, part + 1); });
    }

    // f(row0, row1) over all rows, in parallel where it is worth it.
    template <class F>
    void by_rows(int32_t rows, int64_t width, F&& work) {
        const int32_t parts = rows * width < WORTH_SHARING ? 1 : std::min<int32_t>(rows, 4 * c_.pool.threads());
        if (parts <= 1) return work(0, rows);
        c_.pool.run(parts, [&](int32_t part, int32_t) { work(int32_t(int64_t(rows) * part / parts), int32_t(int64_t(rows) * (part + 1) / parts)); });
    }

    void product(const float* x, const void* w, const float* bias, float* y, int32_t rows, int32_t K, int32_t N, int32_t format);
    Product plan(const float* x, const void* w, const float* bias, float* y, int32_t rows, int32_t K, int32_t N, int32_t format) const;
    void multiply(const Product& p);
    template <class F>
    void spread(Product p, int32_t grain, F&& body);
    Cut cut(const Product& p, int32_t grain) const;
    void look_ahead() const;
    void announce(const Matrix& matrix) const;
    int32_t matrices(Matrix (&list)[2]) const;
    Pieces fetched_meanwhile() const;
    Pieces take_pages(int64_t part, int64_t whole) const;
    bool makes_heads() const;
    int32_t make_heads();
    void mlp();
    int32_t take();
    int32_t rope_of(Rope& r) const;
    int32_t rope();
    int32_t entries_of(Entries& e) const;
    int32_t write_kv();
    static bool sound(const Attention& a, int32_t rows, int32_t segments, int32_t pages);
    int32_t row_block(const Attention& a, int32_t segments) const;
    int32_t attention();
    int32_t keep_kv();
    template <class T>
    void keep(T* cache, bool transposed);
    void moe();
    void route(const float* logits, int32_t E, int32_t top_k, bool normalize, int32_t* experts, float* weights);
    void concat();
    void noise();
    void pick();
    void choose();
    void prepare(Product& p);
    void make_rows(int32_t row0, int32_t row1) const;
    bool feeds() const;

    fr_context& c_;
    const Kernels& k_;
    const fr_op& op_;
    int32_t left_;
    const Call* maker_ = nullptr;  // an op that has yet to make the rows of this op's first product
    int32_t at_work_ = 0;          // which of its products
    void* const* table_;
    const int32_t* sizes_;
    int32_t rows_;
};

// Room for the packed rows of x.
void Call::prepare(Product& p) { p.packed = c_.packed.room<char>(size_t(p.rows) * k_.packed_bytes(p.format, p.K)); }

Cut Call::cut(const Product& p, int32_t grain) const {
    const int32_t threads = c_.pool.threads(), panels = (p.N + PANEL - 1) / PANEL, units = (panels + grain - 1) / grain;
    const size_t bytes = size_t(p.rows) * k_.packed_bytes(p.format, p.K);
    const bool shared = threads > 1 && int64_t(p.rows) * p.K * p.N > 16 * WORTH_SHARING;
    const int32_t tasks = k_.row_tasks * threads;
    if (shared && p.tiles >= tasks && p.rows >= tasks * k_.row_task && panel_bytes(p.format, p.K) * size_t(panels) <= NEAR)
        return {panels, grain, 1, tasks, true};
    const int32_t groups = std::min<int32_t>(p.tiles, int32_t((bytes + ROWS_TOGETHER - 1) / ROWS_TOGETHER));
    const int32_t parts = shared ? (TASKS * threads + groups - 1) / groups : 1, streams = panels / STREAM / threads * threads;
    const int32_t most = p.rows > k_.stream_rows ? panels : std::max(shared ? threads : 1, streams);
    Cut cut{panels, grain, std::min(units, std::max(1, std::min(parts, most))), groups, shared};
    const int32_t even = units / threads * threads;
    if (!shared || groups > 1 || p.rows > k_.stream_rows || p.tiles < threads || !even || even == units) return cut;
    cut.panels = even * grain, cut.rest = panels - cut.panels;
    cut.chunks = std::max(threads, cut.chunks / threads * threads);
    while (even % cut.chunks) cut.chunks -= threads;
    return cut;
}

// Products that the op consists of: how many.
int32_t Call::matrices(Matrix (&list)[2]) const {
    switch (op_.code) {
        case FR_MATMUL:
        case FR_LOGITS:
            list[0] = {t<void>(1), i(0), i(1), i(2)};
            return 1;
        case FR_MLP:
            list[0] = {t<void>(1), i(0), both(i(1)), i(2)};
            list[1] = {t<void>(3), i(1), i(4), i(5)};
            return 2;
        default:
            return 0;
    }
}

// Tells the pool where the program's next product begins. A layer has about seven places where threads meet and no weights are read.
void Call::look_ahead() const {
    Matrix list[2];
    for (int32_t places = 0; places < left_; ++places) {
        const Call next = later(places);
        if (next.op_.code == FR_MOE) return;  // its router is small, and which experts follow is not known
        const int32_t first = places ? 0 : at_work_ + 1;
        if (first < next.matrices(list)) return next.announce(list[first]);
    }
}

void Call::announce(const Matrix& matrix) const {
    if (!rows_) return;
    const Product p = plan(nullptr, matrix.data, nullptr, nullptr, rows_, matrix.K, matrix.N, matrix.format);
    const Cut cut = this->cut(p, makes_heads() ? later(1).i(2) / PANEL : 1);
    const size_t panel = panel_bytes(p.format, p.K);
    for (int32_t thread = 0; thread < std::min(c_.pool.threads(), cut.chunks); ++thread) {
        const int32_t begin = cut.begin(thread), panels = cut.begin(thread + 1) - begin;
        c_.pool.expect(thread, static_cast<const char*>(p.w) + size_t(begin) * panel, std::min(EXPECTED, size_t(panels) * panel));
    }
}

// With many rows multiplying takes longer than reading weights, and attention the other way round: so the products before an
// attention fetch what it reads of its cache, each a share by its weight.
Pieces Call::fetched_meanwhile() const {
    Matrix list[2];
    if (op_.code == FR_LOGITS || at_work_ >= matrices(list)) return {};
    const int64_t mine = int64_t(list[at_work_].K) * list[at_work_].N;
    int64_t all = 0;
    for (int32_t places = 0; places < left_; ++places) {
        const Call next = later(places);
        if (next.op_.code == FR_ATTENTION) return next.take_pages(mine, all);
        for (int32_t count = next.matrices(list), at = places ? 0 : at_work_; at < count; ++at) all += int64_t(list[at].K) * list[at].N;
    }
    return {};
}

// `part` of `whole` of an attention's pages that are not given away yet.
Pieces Call::take_pages(int64_t part, int64_t whole) const {
    const size_t bytes = size_t(i(1)) * page_bytes(Format(i(4)), i(2));  // of a page, all heads
    if (bytes % 64) return {};
    if (c_.reader != &op_) {
        c_.reader = &op_, c_.given = 0, c_.pages.clear();
        const int32_t columns = sizes_[FR_PAGE_COLUMNS], window = i(3);
        for (int32_t s = 0; s < sizes_[FR_SEGMENTS]; ++s) {
            const int32_t end = std::min(t<int32_t>(9)[s], columns * PAGE), first = window > 0 ? std::max(0, end - window) : 0;
            for (int32_t column = first / PAGE; column * PAGE < end; ++column) {
                const int32_t page = t<int32_t>(10)[int64_t(s) * columns + column];
                if (page < 0 || page >= i(5)) continue;  // attention will refuse it
                for (const int cache : {1, 2}) c_.pages.push_back(t<char>(cache) + size_t(page) * bytes);
            }
        }
    }
    const char* const* from = c_.pages.data() + c_.given;
    const auto count = int64_t(c_.pages.size() - c_.given) * part / whole;
    c_.given += size_t(count);
    return {from, count, int64_t(bytes)};
}

// body(product, panel0, panel1, tile0, tile1, thread) for all panels and all row tiles. Before that rows are made, where an op left that to
// their product, and packed, if they are not packed yet.
template <class F>
void Call::spread(Product p, int32_t grain, F&& body) {
    const int32_t threads = c_.pool.threads();
    const Cut cut = this->cut(p, grain);
    const bool ready = p.packed != nullptr;
    if (!ready) prepare(p);
    if (op_.code != FR_MOE) look_ahead();  // behind an expert comes another one, and which is known only in there
    if (p.format >= INT8 || p.rows > READ_ROWS) p.soon = fetched_meanwhile();
    const Call* maker = at_work_ ? nullptr : maker_;
    const auto pack = [&](int32_t tile0, int32_t tile1) {
        if (maker) maker->make_rows(first_row(p, tile0), first_row(p, tile1));
        k_.pack_rows(p, tile0, tile1);
    };
    if (!cut.by_rows() && !ready) by_parts(p.tiles, int64_t(p.rows) * p.K > WORTH_PACKING, pack);
    const int32_t whole = cut.groups * cut.chunks;
    auto task = [&](int32_t at, int32_t thread) {
        if (at >= whole) {
            const int32_t panel = cut.panels + (at - whole) / p.tiles * grain, tile = (at - whole) % p.tiles;
            Product mine = p;
            mine.next = -1;
            return body(mine, panel, std::min(panel + grain, cut.panels + cut.rest), tile, tile + 1, thread);
        }
        const int32_t group = at / cut.chunks, chunk = at % cut.chunks;
        const auto tile0 = int32_t(int64_t(p.tiles) * group / cut.groups), tile1 = int32_t(int64_t(p.tiles) * (group + 1) / cut.groups);
        if (cut.by_rows() && !ready) pack(tile0, tile1);
        Product mine = p;
        mine.next = chunk + threads < cut.chunks ? cut.begin(chunk + threads) : -1, mine.cold = at < threads;
        body(mine, cut.begin(chunk), cut.begin(chunk + 1), tile0, tile1, thread);
    };
    if (cut.shared)
        c_.pool.run(whole + (cut.rest + grain - 1) / grain * p.tiles, task);
    else
        for (int32_t at = 0; at < whole; ++at) task(at, 0);
}

Product Call::plan(const float* x, const void* w, const float* bias, float* y, int32_t rows, int32_t K, int32_t N, int32_t format) const {
    Product p{};
    p.w = w, p.x = x, p.bias = bias, p.y = y, p.y_stride = N, p.K = K, p.N = N, p.rows = rows;
    p.format = Format(format), p.tiles = k_.tiles(p.format, rows), p.crossing = c_.crossing, p.unasked = c_.unasked;
    return p;
}

void Call::product(const float* x, const void* w, const float* bias, float* y, int32_t rows, int32_t K, int32_t N, int32_t format) {
    if (rows) multiply(plan(x, w, bias, y, rows, K, N, format));
}

void Call::multiply(const Product& p) {
    spread(p, 1, [&](const Product& mine, int32_t panel0, int32_t panel1, int32_t tile0, int32_t tile1, int32_t) {
        k_.multiply(mine, panel0, panel1, tile0, tile1);
    });
}

// Whether the next ops rotate and keep the heads that this product makes, each head by itself and of whole panels.
bool Call::makes_heads() const {
    if (op_.code != FR_MATMUL || left_ < 3) return false;
    const fr_op &rope = (&op_)[1], &kv = (&op_)[2];
    if (rope.code != FR_ROPE || kv.code != FR_WRITE_KV || rope.t[0] != op_.t[3] || kv.t[0] != op_.t[3]) return false;
    const int32_t heads = rope.i[0], kv_heads = rope.i[1], D = rope.i[2];
    return rope.rows == op_.rows && kv.rows == op_.rows && kv.i[0] == heads && kv.i[1] == kv_heads && kv.i[2] == D && D % PANEL == 0 &&
           i(1) == (heads + 2 * kv_heads) * D && rope.i[4] % D == 0 && rope.i[4] <= D && rope.i[5] % D == 0 && rope.i[5] <= D;
}

// A product whose columns are heads of q, k and v, their rotation, and their entries in the cache.
int32_t Call::make_heads() {
    Rope rope;
    Entries entries;
    if (later(1).rope_of(rope) || later(2).entries_of(entries)) return FR_RANGE;
    if (!rows_) return FR_OK;
    const Product p = plan(t(0), t<void>(1), t(2), t(3), rows_, i(0), i(1), i(2));
    const int32_t grain = rope.D / PANEL, turned = rope.heads + rope.kv_heads;
    spread(p, grain, [&](const Product& mine, int32_t panel0, int32_t panel1, int32_t tile0, int32_t tile1, int32_t) {
        k_.multiply(mine, panel0, panel1, tile0, tile1);
        const int32_t row0 = first_row(p, tile0), row1 = first_row(p, tile1), head0 = panel0 / grain, head1 = panel1 / grain;
        if (head0 < turned) k_.rope(rope, row0, row1, head0, std::min(head1, turned));
        if (head1 > rope.heads) k_.write_kv(entries, row0, row1, std::max(head0 - rope.heads, 0), head1 - rope.heads);
    });
    return FR_OK;
}

// Gate and up with their activation, and down. A task has sums of gate and up for a few panels only, in its own cache, and packs what comes out of
// them for down, unless down's format rounds whole rows.
void Call::mlp() {
    if (!rows_) return;
    const int32_t F = i(1);
    const Product wide = plan(t(0), t<void>(1), nullptr, nullptr, rows_, i(0), both(F), i(2));
    Product down = plan(nullptr, t<void>(3), t(4), t(5), rows_, F, i(4), i(5));
    const bool packs = down.format == wide.format && down.format < INT8;
    float* gated = packs ? nullptr : c_.gated.room<float>(size_t(rows_) * size_t(F));
    if (packs) down.packed = c_.gated.room<char>(size_t(rows_) * k_.packed_bytes(down.format, F));
    spread(wide, 1, [&](const Product& mine, int32_t panel0, int32_t panel1, int32_t tile0, int32_t tile1, int32_t thread) {
        const int32_t row0 = first_row(wide, tile0), rows = first_row(wide, tile1) - row0;
        const int32_t together = std::max(GATED_PANELS, k_.gated_sums / (rows * PANEL));
        float* sums = c_.scratch[size_t(thread)].room<float>(size_t(rows) * size_t(together) * PANEL);
        Product part = mine;
        for (int32_t panel = panel0, end; panel < panel1; panel = end, part.cold = false) {
            end = std::min(panel + together, panel1);
            part.y_stride = (end - panel) * PANEL, part.y = sums - row0 * part.y_stride, part.y_column = panel * PANEL;
            part.next = end < panel1 ? end : mine.next;
            k_.multiply(part, panel, end, tile0, tile1);
            const int32_t column = panel * HALF, room = (end - panel) * HALF, count = std::min(room, F - column);
            const float *gate_bias = t(2) ? t(2) + column : nullptr, *up_bias = t(2) ? t(2) + F + column : nullptr;
            float* out = packs ? sums : gated + int64_t(row0) * F + column;
            k_.gate_panels(sums, gate_bias, up_bias, out, packs ? room : F, rows, count, i(3));
            for (int32_t tile = tile0; packs && tile < tile1; ++tile)
                k_.pack_columns(down, tile, sums + int64_t(first_row(wide, tile) - row0) * room, room, column, count);
        }
    });
    at_work_ = 1;
    down.x = gated;
    multiply(down);
}

// Norm, addition and norm, or gate: ops that make a row of what the next product multiplies out of the same row.
void Call::make_rows(int32_t row0, int32_t row1) const {
    const int64_t H = i(0), at = row0 * H;
    switch (op_.code) {
        case FR_NORM: return k_.norm(t(0), t(1), t(2), i(0), f(0), row0, row1);
        case FR_GATE: return k_.gate(t(0), t(1), i(0), i(1), row0, row1);
        case FR_ADD_NORM:
            k_.add(t(0) + at, t(1) + at, t(4) + at, (row1 - row0) * H, f(1));
            return k_.norm(t(4), t(2), t(3), i(0), f(0), row0, row1);
    }
}

// Whether the next op is the product of the rows that this op makes, and may have them made tile by tile as it packs them: there are tiles
// enough, and it does not write where they come from.
bool Call::feeds() const {
    const int32_t out = op_.code == FR_NORM ? 2 : op_.code == FR_GATE ? 1 : op_.code == FR_ADD_NORM ? 3 : -1;
    if (out < 0 || left_ < 2) return false;
    const Call next = later(1);
    const fr_op& op = next.op_;
    if ((op.code != FR_MATMUL && op.code != FR_MLP) || op.rows != op_.rows || op.t[0] != op_.t[out]) return false;
    if (std::count(op_.t, op_.t + std::size(op_.t), op.t[op.code == FR_MLP ? 5 : 3])) return false;
    return k_.tiles(Format(op.i[2]), rows_) >= c_.pool.threads() || int64_t(rows_) * i(0) < WORTH_SHARING;
}

int32_t Call::take() {
    const int64_t width = i(0);
    const int32_t *rows = t<int32_t>(1), count = i(1) < 0 ? sizes_[-1 - i(1)] : i(1);
    if (!within(rows, rows_, count)) return FR_RANGE;
    for (int32_t r = 0; r < rows_; ++r) memcpy(t(2) + r * width, t(0) + rows[r] * width, size_t(width) * 4);
    return FR_OK;
}

int32_t Call::rope_of(Rope& r) const {
    if (i(3) && !within(t<int32_t>(1), rows_, i(6))) return FR_RANGE;
    r = {t(0), t<int32_t>(1), t(2), t(3), t(4), t(5), i(0), i(1), i(2), i(3), i(4), i(5), f(0)};
    return FR_OK;
}

int32_t Call::rope() {
    Rope r;
    if (rope_of(r)) return FR_RANGE;
    const int32_t heads = r.heads + r.kv_heads;
    by_rows(rows_, int64_t(heads) * r.D, [&](int32_t row0, int32_t row1) { k_.rope(r, row0, row1, 0, heads); });
    return FR_OK;
}

int32_t Call::entries_of(Entries& e) const {
    if (!within(t<int32_t>(3), rows_, int64_t(i(4)) * PAGE)) return FR_RANGE;
    const int64_t stride = int64_t(i(0) + 2 * i(1)) * i(2);
    e = {t(0) + int64_t(i(0)) * i(2), stride, t<void>(1), t<void>(2), t<int32_t>(3), i(1), i(2), Format(i(3))};
    return FR_OK;
}

int32_t Call::write_kv() {
    Entries e;
    if (entries_of(e)) return FR_RANGE;
    by_rows(rows_, 2 * int64_t(e.kv_heads) * e.D, [&](int32_t row0, int32_t row1) { k_.write_kv(e, row0, row1, 0, 2 * e.kv_heads); });
    return FR_OK;
}

// Whether kernels that follow these segments, rows, parents and pages stay inside of all of them.
bool Call::sound(const Attention& a, int32_t rows, int32_t segments, int32_t pages) {
    const int64_t reach = int64_t(a.page_columns) * PAGE;  // positions that a segment's pages hold
    if (!within(a.slots, rows, int64_t(pages) * PAGE) || !within(a.pages, int64_t(segments) * a.page_columns, pages)) return false;
    if (a.starts[0] != 0 || a.starts[segments] != rows) return false;
    for (int32_t s = 0; s < segments; ++s) {
        const int64_t first = a.starts[s], end = a.starts[s + 1], base = first + a.known[s];
        if (a.known[s] < 0 || base > end || end > rows || a.context[s] < 0 || int64_t(a.context[s]) + a.known[s] > reach) return false;
        for (int64_t r = first; r < end; ++r) {
            const int32_t at = a.positions[r], parent = a.parents[r];
            if (at < 0) return false;
            if (r < base ? at >= reach : parent >= base ? parent >= r || at != a.positions[parent] + 1 : at > reach) return false;
        }
    }
    return true;
}

// Rows of a task: a few long sequences make enough tasks for all threads.
int32_t Call::row_block(const Attention& a, int32_t segments) const {
    const auto tasks = [&](int32_t block) {
        int32_t count = 0;
        for (int32_t s = 0; s < segments; ++s) count += (a.starts[s + 1] - a.starts[s] + block - 1) / block * a.kv_heads;
        return count;
    };
    int32_t block = ROW_BLOCK;
    while (block > LEAST_ROWS && tasks(block) < EVEN * c_.pool.threads()) block /= 2;
    return block;
}

int32_t Call::attention() {
    Attention a{};
    a.qkv = t(0), a.keys = t<void>(1), a.values = t<void>(2), a.out = t(3);
    a.positions = t<int32_t>(4), a.slots = t<int32_t>(5), a.parents = t<int32_t>(6), a.starts = t<int32_t>(7);
    a.known = t<int32_t>(8), a.context = t<int32_t>(9), a.pages = t<int32_t>(10), a.sinks = t(11);
    a.page_columns = sizes_[FR_PAGE_COLUMNS];
    a.heads = i(0), a.kv_heads = i(1), a.D = i(2), a.window = i(3), a.format = Format(i(4));
    a.scale = f(0), a.softcap = f(1);

    if (!sound(a, rows_, sizes_[FR_SEGMENTS], i(5))) return FR_RANGE;
    if (!rows_) return FR_OK;

    c_.tasks.clear();
    size_t bytes = 0;
    int64_t work = 0;
    int32_t most = 1;
    const int32_t group = a.heads / a.kv_heads, block = row_block(a, sizes_[FR_SEGMENTS]);
    for (int32_t s = 0; s < sizes_[FR_SEGMENTS]; ++s) {
        const int32_t end = a.starts[s + 1];
        for (int32_t row0 = a.starts[s], row1; row0 < end; row0 = row1) {
            row1 = std::min(end, row0 + block);
            const int32_t width = (a.positions[row1 - 1] / PAGE + 1) * PAGE * group;
            bytes = std::max(bytes, k_.attention_bytes(a, s, row0, row1));
            work += int64_t(row1 - row0) * width * a.D;
            most = std::max(most, row1 - row0);
            for (int32_t h = 0; h < a.kv_heads; ++h) c_.tasks.push_back({s, h, row0, row1});
        }
    }
    for (auto& buffer : c_.scratch) buffer.room<char>(bytes + 64);
    // Tasks of few rows are short: some in a row go to the same thread, which then knows what it does next.
    const int32_t threads = work * a.kv_heads > 2 * WORTH_SHARING ? c_.pool.threads() : 1;
    const auto count = int32_t(c_.tasks.size()), together = most > FEW_ROWS ? 1 : std::max(1, count / (TASKS * threads));
    c_.told.assign(size_t(threads), -1);
    // Lines of the next product's weights with each task; with few rows memory is what everybody waits for anyway.
    const int32_t each = k_.tiles(BF16, rows_) > 1 ? int32_t(EXPECTED / 64) * threads / count + 1 : 0;
    auto run = [&](int32_t part, int32_t thread) {
        const int32_t begin = part * together, end = std::min(count, begin + together);
        int32_t told = c_.told[size_t(thread)];
        for (int32_t at = begin; at < end; ++at) {
            const int32_t next = at + 1 < end ? at + 1 : begin + threads * together;
            int32_t lines = each;
            const char* more = c_.pool.take(thread, lines);
            const Beside beside{next < count ? &c_.tasks[size_t(next)] : nullptr, told == at, more, lines};
            k_.attention(a, c_.tasks[size_t(at)], beside, c_.scratch[size_t(thread)].room<char>(bytes + 64));
            told = next;
        }
        c_.told[size_t(thread)] = told;
    };
    const int32_t parts = (count + together - 1) / together;
    if (threads > 1)
        c_.pool.run(parts, run);
    else
        for (int32_t part = 0; part < parts; ++part) run(part, 0);
    return FR_OK;
}

template <class T>
void Call::keep(T* cache, bool transposed) {
    const int32_t layers = i(0), pages = i(1), heads = i(2), D = i(3), count = i(5);
    const int32_t *source = t<int32_t>(2), *target = t<int32_t>(3);
    const int64_t block = int64_t(page_bytes(Format(i(4)), D) / sizeof(T)), step = transposed ? PAGE : 1, place = transposed ? 1 : D;
    const int32_t scale = i(4) == INT8 ? 4 : 0;  // bytes of an entry's scale, behind the page's codes
    T* held = c_.kept.room<T>(size_t(count) * heads * (D + scale));
    for (int32_t layer = 0; layer < layers; ++layer) {
        T* base = cache + layer * (pages * heads * block);
        for (int pass = 0; pass < 2; ++pass)
            for (int32_t n = 0; n < count; ++n) {
                const int64_t slot = pass ? target[n] : source[n];
                for (int32_t h = 0; h < heads; ++h) {
                    T* page = base + (slot / PAGE * heads + h) * block;
                    T *at = page + slot % PAGE * place, *kept = held + (int64_t(n) * heads + h) * (D + scale);
                    for (int32_t d = 0; d < D; ++d) pass ? void(at[d * step] = kept[d]) : void(kept[d] = at[d * step]);
                    T *size = page + PAGE * D + slot % PAGE * scale, *keep = kept + D;
                    if (scale) memcpy(pass ? size : keep, pass ? keep : size, 4);
                }
            }
    }
}

int32_t Call::keep_kv() {
    const int64_t slots = int64_t(i(1)) * PAGE;
    if (!within(t<int32_t>(2), i(5), slots) || !within(t<int32_t>(3), i(5), slots)) return FR_RANGE;
    if (i(4) == BF16) {
        keep(t<uint16_t>(0), true);
        keep(t<uint16_t>(1), false);
    } else if (i(4) == INT8) {
        keep(t<int8_t>(0), true);
        keep(t<int8_t>(1), false);
    } else {
        keep(t(0), true);
        keep(t(1), false);
    }
    return FR_OK;
}

// Softmax over the experts, the top_k of them in ascending order, ties to the lower index.
void Call::route(const float* logits, int32_t E, int32_t top_k, bool normalize, int32_t* experts, float* weights) {
    std::vector<int32_t> order(static_cast<size_t>(E));
    for (int32_t e = 0; e < E; ++e) order[size_t(e)] = e;
    std::partial_sort(order.begin(), order.begin() + top_k, order.end(),
                      [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); });
    const float peak = logits[order[0]];
    float total = 0.0f, chosen = 0.0f;
    for (int32_t e = 0; e < E; ++e) total += std::exp(logits[e] - peak);
    std::sort(order.begin(), order.begin() + top_k);
    for (int32_t j = 0; j < top_k; ++j) {
        experts[j] = order[size_t(j)];
        weights[j] = std::exp(logits[experts[j]] - peak) / total;
        chosen += weights[j];
    }
    if (normalize)
        for (int32_t j = 0; j < top_k; ++j) weights[j] /= chosen;
}

void Call::moe() {
    const int32_t H = i(0), E = i(1), top_k = i(2), F = i(3), activation = i(4), rows = rows_;
    const float* x = t(0);
    void* const* experts = t<void*>(2);
    float* out = t(3);
    float* logits = c_.moe_route.room<float>(size_t(rows) * (size_t(E) + 2 * size_t(top_k)));
    float* weights = logits + int64_t(rows) * E;
    auto* chosen = reinterpret_cast<int32_t*>(weights + int64_t(rows) * top_k);
    product(x, t<void>(1), nullptr, logits, rows, H, E, i(6));
    for (int64_t r = 0; r < rows; ++r) route(logits + r * E, E, top_k, i(5) != 0, chosen + r * top_k, weights + r * top_k);
    memset(out, 0, size_t(rows) * size_t(H) * 4);
    for (int32_t e = 0; e < E; ++e) {
        c_.picked.clear();
        for (int32_t r = 0; r < rows; ++r)
            for (int32_t j = 0; j < top_k; ++j)
                if (chosen[int64_t(r) * top_k + j] == e) c_.picked.emplace_back(r, weights[int64_t(r) * top_k + j]);
        const auto count = int32_t(c_.picked.size());
        if (!count) continue;
        float* in = c_.moe_rows.room<float>(size_t(count) * H);
        float* wide = c_.moe_wide.room<float>(size_t(count) * 2 * F);
        float* gated = c_.moe_gated.room<float>(size_t(count) * F);
        float* value = c_.moe_out.room<float>(size_t(count) * H);
        for (int32_t n = 0; n < count; ++n) memcpy(in + int64_t(n) * H, x + int64_t(c_.picked[size_t(n)].first) * H, size_t(H) * 4);
        product(in, experts[e], nullptr, wide, count, H, 2 * F, i(7));
        by_rows(count, F, [&](int32_t a, int32_t b) { k_.gate(wide, gated, F, activation, a, b); });
        product(gated, experts[E + e], nullptr, value, count, F, H, i(7));
        for (int32_t n = 0; n < count; ++n) {
            float* to = out + int64_t(c_.picked[size_t(n)].first) * H;
            k_.add(value + int64_t(n) * H, to, to, H, c_.picked[size_t(n)].second);
        }
    }
}

void Call::concat() {
    int64_t width = 0, at = 0;
    for (int32_t part = 0; part < i(0); ++part) width += i(1 + part);
    for (int32_t part = 0; part < i(0); at += i(1 + part), ++part)
        for (int64_t r = 0; r < rows_; ++r) memcpy(t(0) + r * width + at, t(1 + part) + r * i(1 + part), size_t(i(1 + part)) * 4);
}

void Call::noise() {
    const uint64_t seed = uint64_t(uint32_t(i(1))) << 32 | uint32_t(i(0)), index = uint64_t(uint32_t(i(3))) << 32 | uint32_t(i(2));
    const int32_t vocab = i(4), chunk = 16384;
    float* out = t(0);
    c_.pool.run((vocab + chunk - 1) / chunk, [&](int32_t part, int32_t) {
        k_.dice(seed, index, part * chunk, std::min(vocab, (part + 1) * chunk), out + int64_t(part) * chunk);
    });
}

void Call::pick() {
    const int32_t V = i(0), count = (V + PICK_PART - 1) / PICK_PART;
    auto row = [&](int32_t r, int32_t thread) {
        Part* parts = c_.scratch[size_t(thread)].room<Part>(size_t(count));
        const float *scores = t(0) + int64_t(r) * V, *noise = t(1) ? t(1) + int64_t(r) * V : nullptr;
        for (int32_t part = 0, at = 0; part < count; ++part, at += PICK_PART)
            k_.pick_part(scores + at, noise ? noise + at : nullptr, at, std::min(PICK_PART, V - at), parts + part);
        k_.pick(parts, count, t<int64_t>(2) + r, t(3) + r);
    };
    if (int64_t(rows_) * V > WORTH_SHARING)
        c_.pool.run(rows_, row);
    else
        for (int32_t r = 0; r < rows_; ++r) row(r, 0);
}

// The output head and the choice in it. A task is one part of the vocabulary, whose scores only the thread that computes them ever sees.
void Call::choose() {
    const int32_t K = i(0), N = i(1), count = (N + PICK_PART - 1) / PICK_PART, threads = c_.pool.threads();
    Part* parts = c_.parts.room<Part>(size_t(CHOOSE_ROWS) * size_t(count));
    for (int32_t row0 = 0; row0 < rows_; row0 += CHOOSE_ROWS) {
        Product p = plan(t(0) + int64_t(row0) * K, t<void>(1), nullptr, nullptr, std::min(CHOOSE_ROWS, rows_ - row0), K, N, i(2));
        prepare(p);
        by_parts(p.tiles, int64_t(p.rows) * K > WORTH_PACKING, [&](int32_t tile0, int32_t tile1) { k_.pack_rows(p, tile0, tile1); });
        auto task = [&](int32_t at, int32_t thread) {
            float* scores = c_.scratch[size_t(thread)].room<float>(size_t(CHOOSE_ROWS + 1) * PICK_PART);
            float* noise = scores + CHOOSE_ROWS * PICK_PART;
            const int32_t first = at * PICK_PART, end = std::min(N, first + PICK_PART), width = end - first;
            Product mine = p;
            mine.y = scores, mine.y_stride = PICK_PART, mine.y_column = first;
            mine.next = at + threads < count ? (at + threads) * (PICK_PART / PANEL) : -1, mine.cold = at < threads;
            k_.multiply(mine, first / PANEL, (end + PANEL - 1) / PANEL, 0, p.tiles);
            for (int32_t row = 0; row < p.rows; ++row) {
                const int32_t place = row0 + row;
                const float temperature = t(2)[place];
                const bool sampled = t<int32_t>(3)[place] != 0;
                float* y = scores + row * PICK_PART;
                if (f(0) != 1.0f || f(1) > 0.0f) k_.cap(y, width, f(0), f(1));
                if (temperature != 1.0f) k_.divide(y, width, temperature);
                if (sampled) k_.dice(uint64_t(t<int64_t>(4)[place]), uint64_t(t<int64_t>(5)[place]), first, end, noise);
                k_.pick_part(y, sampled ? noise : nullptr, first, width, parts + int64_t(row) * count + at);
            }
        };
        if (int64_t(p.rows) * K * N > 16 * WORTH_SHARING)
            c_.pool.run(count, task);
        else
            for (int32_t at = 0; at < count; ++at) task(at, 0);
        for (int32_t row = 0; row < p.rows; ++row)
            k_.pick(parts + int64_t(row) * count, count, t<int64_t>(6) + row0 + row, t(7) + row0 + row);
    }
}

int32_t Call::run() {
    switch (op_.code) {
        case FR_EMBED:
            if (!within(t<int32_t>(1), rows_, i(2))) return FR_RANGE;
            by_rows(rows_, i(0), [&](int32_t a, int32_t b) { k_.embed(t<void>(0), Format(i(1)), t<int32_t>(1), t(2), i(0), f(0), a, b); });
            return FR_OK;
        case FR_TAKE:
            return take();
        case FR_ADD: {
            const int64_t H = i(0);
            by_rows(rows_, H, [&](int32_t a, int32_t b) { k_.add(t(0) + a * H, t(1) + a * H, t(2) + a * H, (b - a) * H, f(0)); });
            return FR_OK;
        }
        case FR_NORM:
        case FR_ADD_NORM:
        case FR_GATE:
            by_rows(rows_, i(0), [&](int32_t a, int32_t b) { make_rows(a, b); });
            return FR_OK;
        case FR_MATMUL:
            product(t(0), t<void>(1), t(2), t(3), rows_, i(0), i(1), i(2));
            return FR_OK;
        case FR_MLP:
            mlp();
            return FR_OK;
        case FR_ROPE:
            return rope();
        case FR_WRITE_KV:
            return write_kv();
        case FR_ATTENTION:
            return attention();
        case FR_KEEP_KV:
            return keep_kv();
        case FR_MOE:
            moe();
            return FR_OK;
        case FR_LOGITS:
            product(t(0), t<void>(1), nullptr, t(2), rows_, i(0), i(1), i(2));
            if (f(0) != 1.0f || f(1) > 0.0f)
                by_rows(rows_, i(1), [&](int32_t a, int32_t b) { k_.cap(t(2) + int64_t(a) * i(1), int64_t(b - a) * i(1), f(0), f(1)); });
            return FR_OK;
        case FR_PICK:
            pick();
            return FR_OK;
        case FR_CHOOSE:
            choose();
            return FR_OK;
        case FR_NOISE:
            noise();
            return FR_OK;
        case FR_NOISE_AT:
            k_.dice_at(t<int64_t>(0), t<int64_t>(1), t<int64_t>(2), i(0), t(3));
            return FR_OK;
        case FR_CONCAT:
            concat();
            return FR_OK;
        default:
            return FR_UNKNOWN_OP;
    }
}

int32_t Call::run(int32_t& done) {
    if (feeds()) {
        Call next = later(1);
        next.maker_ = this;
        const int32_t status = next.run(done);
        ++done;
        return status;
    }
    const bool heads = makes_heads();
    done = heads ? 3 : 1;
    return heads ? make_heads() : run();
}

}  // namespace

#define FR_EXPORT extern "C" __attribute__((visibility("default")))

FR_EXPORT const char* fr_isas(int32_t i) {
    const auto found = forms(machine());
    return i >= 0 && size_t(i) < found.size() ? found[size_t(i)]->name : nullptr;
}

FR_EXPORT fr_context* fr_open(int32_t threads, const char* isa) {
    for (const Kernels* kernels : forms(machine()))
        if (!isa || !strcmp(isa, kernels->name)) return new (std::nothrow) fr_context(std::max(1, threads), kernels);
    return nullptr;
}

FR_EXPORT void fr_close(fr_context* context) { delete context; }
FR_EXPORT const char* fr_isa(const fr_context* context) { return context->k->name; }
FR_EXPORT uint64_t fr_stalls(const fr_context* context) { return context->pool.stalls(); }

FR_EXPORT uint64_t fr_read(fr_context* context, const void* data, int64_t bytes) {
    constexpr int64_t CHUNK = 1 << 20;
    std::atomic<uint64_t> total{0};
    context->pool.run(int32_t((bytes + CHUNK - 1) / CHUNK), [&](int32_t chunk, int32_t) {
        total += context->k->read(static_cast<const char*>(data) + chunk * CHUNK, std::min(CHUNK, bytes - chunk * CHUNK));
    });
    return total;
}

FR_EXPORT int32_t fr_run(fr_context* context, const fr_op* ops, int32_t count, void* const* table, const int32_t* sizes) {
    const Pool::Watch watch(context->pool);
    context->reader = nullptr;
    try {
        for (int32_t at = 0, done = 0; at < count; at += done)
            if (const int32_t status = Call(*context, ops + at, count - at, table, sizes).run(done)) return status;
    } catch (const std::bad_alloc&) {
        return FR_MEMORY;
    }
    return FR_OK;
}
