// Runs every op on every instruction set of this machine, in buffers of exactly the size they must have, for sanitizers to watch. Shapes are
// drawn at random; each result must be the same bits with one thread and with three, a row of a product the same alone and among others, all
// forms that fuse multiply-add the same but for bf16 dot products (of weights and caches), every form close to the scalar one, and ops that
// run together the same as apart.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "forerun_cpu.h"
#include "forms.h"

namespace {

std::mt19937 dice(1);

int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(dice); }

std::vector<float> floats(size_t count, float scale = 1.0f) {
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> out(count);
    for (float& x : out) x = normal(dice);
    return out;
}

uint16_t bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

std::vector<uint16_t> halves(const std::vector<float>& from) {
    std::vector<uint16_t> out;
    for (float x : from) out.push_back(bf16(x));
    return out;
}

// A program of one op, or of several that may run together, with their operands. `results` are compared.
struct Job {
    std::string name;
    fr_op op{};
    std::vector<fr_op> more;
    std::vector<void*> table;
    int32_t sizes[FR_SIZES] = {};
    std::vector<std::shared_ptr<void>> owned;
    std::vector<std::pair<float*, size_t>> results;
    double tolerance = 1e-4;

    template <class T>
    T* own(std::vector<T> data) {
        auto held = std::make_shared<std::vector<T>>(std::move(data));
        owned.push_back(held);
        return held->data();
    }
    // Aligned to a cache line and not a byte longer than asked for, as packed weights are.
    template <class T>
    T* aligned(const std::vector<T>& data) {
        const size_t bytes = data.size() * sizeof(T);
        void* at = nullptr;
        if (posix_memalign(&at, 64, bytes)) abort();
        memcpy(at, data.data(), bytes);
        owned.emplace_back(at, free);
        return static_cast<T*>(at);
    }
    float* result(size_t count) {
        float* at = own(std::vector<float>(count, NAN));
        results.emplace_back(at, count);
        return at;
    }
    void operands(std::initializer_list<void*> list) {
        int place = 0;
        for (int32_t& t : op.t) t = -1;
        for (void* at : list) {
            if (at) op.t[place] = int32_t(table.size());
            table.push_back(at);
            ++place;
        }
    }
    void integers(std::initializer_list<int32_t> list) { std::copy(list.begin(), list.end(), op.i); }
    void constants(std::initializer_list<float> list) { std::copy(list.begin(), list.end(), op.f); }
};

Job product(int n) {
    Job job;
    const bool half = draw(0, 1), bias = draw(0, 1);
    const bool large = !draw(0, 39);  // more than is multiplied at once, and than counts as near
    const int K = large ? draw(2049, 2200) : draw(1, 300), N = large ? draw(97, 150) : draw(1, 150), panels = (N + 31) / 32, run = half ? 2 : 1, steps = (K + run - 1) / run;
    job.name = "matmul";
    job.op.code = FR_MATMUL;
    job.sizes[FR_N] = n;
    std::vector<float> packed = floats(size_t(panels) * steps * run * 32, 1.0f / std::sqrt(float(K)));
    if (half && K % 2)
        for (size_t at = 0; at < packed.size(); ++at)
            if (at / 64 % steps == size_t(steps - 1) && at % 2) packed[at] = 0;
    void* w = half ? static_cast<void*>(job.aligned(halves(packed))) : job.aligned(packed);
    job.operands({job.own(floats(size_t(n) * K)), w, bias ? job.own(floats(N)) : nullptr, job.result(size_t(n) * N)});
    job.integers({K, N, half});
    job.tolerance = half ? 2e-3 : 1e-4;
    return job;
}

Job product() { return product(draw(1, 60)); }

// Weights of 8 and 4 bits (quant.h): codes of any value, scales and minima between ±1/8 and ±1/4.
Job codes() {
    Job job;
    const int K = draw(0, 4) ? draw(1, 300) : draw(480, 1100), groups = (K + 31) / 32;
    const int format = draw(2, 5), n = draw(1, 60), N = draw(1, 150), panels = (N + 31) / 32;
    const int bytes = format < 4 ? 1024 : 512, scales = format == 2 ? 0 : format == 4 ? 64 : 32;
    std::vector<uint8_t> packed;
    for (int panel = 0; panel < panels; ++panel) {
        for (int g = 0; g < groups; ++g) {
            for (int b = 0; b < bytes; ++b) packed.push_back(uint8_t(draw(0, 255)));
            for (int s = 0; s < scales; ++s) packed.push_back(uint8_t(draw(0, 255))), packed.push_back(uint8_t(0x30 + draw(0, 3) + 0x80 * draw(0, 1)));
        }
        for (float unit : floats(32)) packed.insert(packed.end(), (uint8_t*)&unit, (uint8_t*)&unit + 4);
    }
    job.name = "matmul of codes";
    job.op.code = FR_MATMUL;
    job.sizes[FR_N] = n;
    job.operands({job.own(floats(size_t(n) * K, 0.1f / std::sqrt(float(K)))), job.aligned(packed), draw(0, 1) ? job.own(floats(N)) : nullptr,
                  job.result(size_t(n) * N)});
    job.integers({K, N, format});
    job.tolerance = 1e-3;
    return job;
}

// Gate and up in panels of both, their activation, and down.
Job mlp() {
    Job job;
    const bool half = draw(0, 1), other = !draw(0, 3), bias = draw(0, 1);
    const int n = draw(1, 60), K = draw(1, 150), F = draw(1, 130), N = draw(1, 100);
    job.name = "mlp";
    job.op.code = FR_MLP;
    job.sizes[FR_N] = n;
    const auto weight = [&](bool half, int rows, int columns) {
        const int run = half ? 2 : 1, steps = (columns + run - 1) / run;
        const std::vector<float> packed = floats(size_t((rows + 31) / 32) * steps * run * 32, 1.0f / std::sqrt(float(columns)));
        return half ? static_cast<void*>(job.aligned(halves(packed))) : job.aligned(packed);
    };
    job.operands({job.own(floats(size_t(n) * K)), weight(half, (F + 15) / 16 * 32, K), bias ? job.own(floats(size_t(2) * F)) : nullptr,
                  weight(half != other, N, F), bias ? job.own(floats(N)) : nullptr, job.result(size_t(n) * N)});
    job.integers({K, F, half, draw(0, 4), N, half != other});
    job.tolerance = 1e-2;
    return job;
}

// Pages of keys or values, each of one head: float, bf16, or codes with 16 scales behind them (kv.h).
std::pair<float*, size_t> cache(Job& job, int format, size_t pages, int D) {
    std::vector<uint8_t> packed;
    for (size_t page = 0; page < pages; ++page) {
        const auto add = [&](const void* at, size_t bytes) { packed.insert(packed.end(), (const uint8_t*)at, (const uint8_t*)at + bytes); };
        const std::vector<float> entries = floats(size_t(16) * D);
        if (format == 0) add(entries.data(), entries.size() * 4);
        if (format == 1) add(halves(entries).data(), entries.size() * 2);
        if (format != 2) continue;
        for (size_t e = 0; e < entries.size(); ++e) packed.push_back(uint8_t(draw(-127, 127)));
        add(floats(16, 0.01f).data(), 64);
    }
    return {(float*)job.aligned(packed), packed.size() / 4};
}

Job attention() {
    Job job;
    const int format = draw(0, 2);
    const int sizes[] = {8, 16, 20, 32, 64, 80, 96, 128, 256};
    const int D = sizes[draw(0, 8)], kv_heads = draw(1, 2), heads = kv_heads * draw(1, 4), segments = draw(1, 3), spare = 2;
    std::vector<int32_t> positions, slots, parents, starts{0}, known, context, pages;
    std::vector<std::vector<int32_t>> own;
    int total = 0, columns = 0;
    for (int s = 0; s < segments; ++s) {
        const int past = draw(0, 4) ? draw(0, 70) : draw(200, 540), fed = draw(1, 40), nodes = draw(0, 9), count = (past + fed + nodes + 15) / 16;
        own.emplace_back();
        for (int p = 0; p < count; ++p) own.back().push_back(total++);
        columns = std::max(columns, count);
        std::vector<int> depth;
        for (int r = 0; r < fed + nodes; ++r) {
            const int place = past + r;
            slots.push_back(own.back()[size_t(place) / 16] * 16 + place % 16);
            if (r < fed) {
                positions.push_back(place);
                parents.push_back(-1);
            } else {
                const int parent = draw(-1, r - fed - 1);
                depth.push_back(parent < 0 ? 1 : depth[size_t(parent)] + 1);
                positions.push_back(past + fed - 1 + depth.back());
                parents.push_back(parent < 0 ? -1 : starts.back() + fed + parent);
            }
        }
        starts.push_back(starts.back() + fed + nodes);
        known.push_back(fed);
        context.push_back(past);
    }
    for (const auto& list : own)
        for (int p = 0; p < columns; ++p) pages.push_back(size_t(p) < list.size() ? list[size_t(p)] : 0);
    total += spare;
    const int n = starts.back();
    job.name = "attention";
    job.op.code = FR_ATTENTION;
    job.sizes[FR_N] = n, job.sizes[FR_SEGMENTS] = segments, job.sizes[FR_PAGE_COLUMNS] = columns;
    float *keys = cache(job, format, size_t(total) * kv_heads, D).first, *values = cache(job, format, size_t(total) * kv_heads, D).first;
    job.operands({job.own(floats(size_t(n) * (heads + 2 * kv_heads) * D)), keys, values, job.result(size_t(n) * heads * D),
                  job.own(positions), job.own(slots), job.own(parents), job.own(starts), job.own(known), job.own(context), job.own(pages),
                  draw(0, 1) ? job.own(floats(heads)) : nullptr});
    job.integers({heads, kv_heads, D, draw(0, 1) ? draw(1, 300) : 0, format, total});
    job.constants({1.0f / std::sqrt(float(D)), draw(0, 1) ? 20.0f : 0.0f});
    // Dot products round queries and shares to bf16. Of normal numbers, that moves a score (D products / √D) with a deviation of 1.7e-3; where two
    // positions share a row equally, its values move by (δ₁ − δ₂) / 4 · (v₁ − v₂). 1e-2 = 2.4e-3·3.4 / 4 · 1.4·3.4: one such value in two million.
    if (format == 1) job.tolerance = 1e-2;
    return job;
}

Job rows() {
    Job job;
    const int n = draw(0, 40), H = draw(1, 100);
    job.sizes[FR_N] = n;
    const int kind = draw(0, 10);
    const size_t size = size_t(n) * H;
    switch (kind) {
        case 0:
            job.name = "add_norm";
            job.op.code = FR_ADD_NORM;
            job.operands({job.own(floats(size)), job.own(floats(size)), job.own(floats(H)), job.result(size), job.result(size)});
            job.integers({H});
            job.constants({1e-5f, 0.5f});
            break;
        case 1:
            job.name = "gate";
            job.op.code = FR_GATE;
            job.operands({job.own(floats(2 * size)), job.result(size)});
            job.integers({H, draw(0, 4)});
            break;
        case 2: {
            job.name = "embed";
            job.op.code = FR_EMBED;
            std::vector<int32_t> tokens;
            for (int r = 0; r < n; ++r) tokens.push_back(draw(0, 8));
            job.operands({job.own(halves(floats(size_t(9) * H))), job.own(tokens), job.result(size)});
            job.integers({H, 1, 9});
            job.constants({2.0f});
            break;
        }
        case 3: {
            job.name = "pick";
            job.op.code = FR_PICK;
            job.operands({job.own(floats(size)), draw(0, 1) ? job.own(floats(size)) : nullptr, job.own(std::vector<int64_t>(n)), job.result(n)});
            job.integers({H});
            break;
        }
        case 4:
            job.name = "norm";
            job.op.code = FR_NORM;
            job.operands({job.own(floats(size)), job.own(floats(H)), job.result(size)});
            job.integers({H});
            job.constants({1e-5f});
            break;
        case 5:
            job.name = "add";
            job.op.code = FR_ADD;
            job.operands({job.own(floats(size)), job.own(floats(size)), job.result(size)});
            job.integers({H});
            job.constants({0.5f});
            break;
        case 6: {
            job.name = "concat";
            job.op.code = FR_CONCAT;
            const int other = draw(1, 50);
            job.operands({job.result(size + size_t(n) * other), job.own(floats(size)), job.own(floats(size_t(n) * other))});
            job.integers({2, H, other});
            job.tolerance = 0;
            break;
        }
        case 7: {
            job.name = "take";
            job.op.code = FR_TAKE;
            const int count = draw(1, 9);
            std::vector<int32_t> taken;
            for (int r = 0; r < n; ++r) taken.push_back(draw(0, count - 1));
            job.operands({job.own(floats(size_t(count) * H)), job.own(taken), job.result(size)});
            job.integers({H, count});
            job.tolerance = 0;
            break;
        }
        case 8: {
            job.name = "noise_at";
            job.op.code = FR_NOISE_AT;
            std::vector<int64_t> places[3];
            for (auto& each : places)
                for (int r = 0; r < n; ++r) each.push_back(draw(0, 1 << 30));
            job.operands({job.own(places[0]), job.own(places[1]), job.own(places[2]), job.result(size_t(n))});
            job.integers({n});
            job.tolerance = 0;
            break;
        }
        case 9: {
            job.name = "logits";
            job.op.code = FR_LOGITS;
            const int N = draw(1, 150);
            job.operands({job.own(floats(size)), job.aligned(floats(size_t((N + 31) / 32) * 32 * H, 0.2f)), job.result(size_t(n) * N)});
            job.integers({H, N, 0});
            job.constants({0.5f, draw(0, 1) ? 3.0f : 0.0f});
            break;
        }
        default: {
            job.name = "noise";
            job.op.code = FR_NOISE;
            const int vocab = draw(1, 300);
            job.operands({job.result(vocab)});
            job.integers({draw(0, 1 << 30), draw(0, 1 << 30), draw(0, 1 << 30), 0, vocab});
            job.tolerance = 0;
        }
    }
    return job;
}

Job rotation() {
    Job job;
    const int D = 2 * draw(4, 40), half = draw(0, D / 2), kv_heads = draw(1, 3), heads = kv_heads * draw(1, 3), n = draw(1, 20);
    std::vector<int32_t> positions;
    for (int r = 0; r < n; ++r) positions.push_back(draw(0, 29));
    const size_t width = size_t(heads + 2 * kv_heads) * D;
    job.name = "rope";
    job.op.code = FR_ROPE;
    job.sizes[FR_N] = n;
    float* qkv = job.own(floats(n * width));
    job.operands({qkv, job.own(positions), job.own(floats(size_t(30) * half)), job.own(floats(size_t(30) * half)), job.own(floats(D)),
                  job.own(floats(size_t(kv_heads) * D))});
    job.integers({heads, kv_heads, D, half, D, kv_heads * D, 30});
    job.constants({1e-5f});
    job.results.emplace_back(qkv, n * width);
    return job;
}

Job mixture() {
    Job job;
    const int n = draw(1, 12), H = draw(1, 40), F = draw(1, 30), E = draw(1, 5), top_k = draw(1, E);
    job.name = "moe";
    job.op.code = FR_MOE;
    job.sizes[FR_N] = n;
    const auto packed = [&](int N, int K) { return static_cast<void*>(job.aligned(floats(size_t((N + 31) / 32) * 32 * K, 0.2f))); };
    std::vector<void*> experts;
    for (int e = 0; e < E; ++e) experts.push_back(packed(2 * F, H));
    for (int e = 0; e < E; ++e) experts.push_back(packed(H, F));
    job.operands({job.own(floats(size_t(n) * H)), packed(E, H), job.own(experts), job.result(size_t(n) * H)});
    job.integers({H, E, top_k, F, 0, 1, 0, 0});
    return job;
}

// The output head and the choice in it, greedy and sampled rows.
Job choice() {
    Job job;
    const int n = draw(1, 70), K = draw(1, 40), N = draw(1, 700);
    std::vector<int32_t> sampled;
    std::vector<float> temperatures;
    std::vector<int64_t> seeds, indices;
    for (int r = 0; r < n; ++r) {
        sampled.push_back(draw(0, 1)), temperatures.push_back(sampled[size_t(r)] ? 0.1f * float(draw(1, 20)) : 1.0f);
        seeds.push_back(draw(0, 1 << 30)), indices.push_back(draw(0, 1 << 30));
    }
    job.name = "choose";
    job.op.code = FR_CHOOSE;
    job.sizes[FR_N] = n;
    job.operands({job.own(floats(size_t(n) * K)), job.aligned(floats(size_t((N + 31) / 32) * 32 * K)), job.own(temperatures), job.own(sampled),
                  job.own(seeds), job.own(indices), job.own(std::vector<int64_t>(size_t(n))), job.result(size_t(n))});
    job.integers({K, N, 0});
    job.constants({draw(0, 1) ? 1.0f : 0.5f, draw(0, 1) ? 0.0f : 3.0f});
    job.tolerance = 1e-3;
    return job;
}

Job keep() {
    Job job;
    const int format = draw(0, 2), layers = 2, pages = 3, heads = draw(1, 3), D = draw(1, 40), count = draw(0, 20);
    std::vector<int32_t> source, target;
    for (int c = 0; c < count; ++c) source.push_back(draw(0, 47)), target.push_back(c * 2);
    const auto keys = cache(job, format, size_t(layers) * pages * heads, D), values = cache(job, format, size_t(layers) * pages * heads, D);
    job.name = "keep_kv";
    job.op.code = FR_KEEP_KV;
    job.operands({keys.first, values.first, job.own(source), job.own(target)});
    job.integers({layers, pages, heads, D, format, count});
    job.results = {keys, values};
    return job;
}

// The same bits on every instruction set.
Job write() {
    Job job;
    const int format = draw(0, 2), pages = 3, kv_heads = draw(1, 3), heads = kv_heads * draw(1, 3), D = draw(1, 80), n = draw(0, 20);
    std::vector<int32_t> slots;
    for (int r = 0; r < n; ++r) slots.push_back(r * 7 % 48);
    const auto keys = cache(job, format, size_t(pages) * kv_heads, D), values = cache(job, format, size_t(pages) * kv_heads, D);
    job.name = "write_kv";
    job.op.code = FR_WRITE_KV;
    job.sizes[FR_N] = n;
    job.operands({job.own(floats(size_t(n) * (heads + 2 * kv_heads) * D)), keys.first, values.first, job.own(slots)});
    job.integers({heads, kv_heads, D, format, pages});
    job.results = {keys, values};
    job.tolerance = 0;
    return job;
}

// A product of heads, their rotation and their entries in a cache: one pass where heads are whole panels.
Job heads() {
    Job job;
    const int sizes[] = {16, 32, 64, 96}, D = sizes[draw(0, 3)], kv_heads = draw(1, 2), heads = kv_heads * draw(1, 3), n = draw(1, 40);
    const int K = draw(1, 200), width = (heads + 2 * kv_heads) * D, pages = 3, half = draw(0, D / 2), norm = draw(0, 1) ? D : 0;
    std::vector<int32_t> positions, slots;
    for (int r = 0; r < n; ++r) positions.push_back(draw(0, 29)), slots.push_back(r * 7 % 48);
    const auto keys = cache(job, 0, size_t(pages) * kv_heads, D), values = cache(job, 0, size_t(pages) * kv_heads, D);
    job.name = "heads";
    job.op.code = FR_MATMUL;
    job.sizes[FR_N] = n;
    float* y = job.result(size_t(n) * width);
    job.operands({job.own(floats(size_t(n) * K)), job.aligned(floats(size_t((width + 31) / 32) * 32 * K, 0.2f)), nullptr, y});
    job.integers({K, width, 0});
    const auto add = [&](int code, std::initializer_list<void*> operands, std::initializer_list<int32_t> integers) {
        const fr_op first = job.op;
        job.op = {};
        job.op.code = code;
        job.operands(operands);
        job.op.t[0] = first.t[3];  // the place of y itself, by which neighbours are known
        job.integers(integers);
        job.constants({1e-5f});
        job.more.push_back(job.op);
        job.op = first;
    };
    add(FR_ROPE,
        {y, job.own(positions), job.own(floats(size_t(30) * half)), job.own(floats(size_t(30) * half)), norm ? job.own(floats(D)) : nullptr,
         norm ? job.own(floats(D)) : nullptr},
        {heads, kv_heads, D, half, norm, norm, 30});
    add(FR_WRITE_KV, {y, keys.first, values.first, job.own(slots)}, {heads, kv_heads, D, 0, pages});
    job.results.push_back(keys), job.results.push_back(values);
    return job;
}

// A product, and attention over pages that it may fetch meanwhile.
Job before_attention() {
    Job behind = attention(), job = product(behind.sizes[FR_N]);
    for (int32_t& at : behind.op.t) at += at < 0 ? 0 : int32_t(job.table.size());
    const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
    append(job.table, behind.table), append(job.owned, behind.owned), append(job.results, behind.results);
    std::copy(behind.sizes, behind.sizes + FR_SIZES, job.sizes);
    job.more.push_back(behind.op);
    job.name = "a product before attention";
    job.tolerance = std::max(job.tolerance, behind.tolerance);
    return job;
}

// `apart`: every op by itself.
bool run(const Job& job, fr_context* context, std::vector<float>& out, bool apart = false) {
    std::vector<fr_op> program{job.op};
    program.insert(program.end(), job.more.begin(), job.more.end());
    const int count = int(program.size()), step = apart ? 1 : count;
    for (int at = 0; at < count; at += step)
        if (const int status = fr_run(context, program.data() + at, step, job.table.data(), job.sizes)) {
            printf("%s: status %d\n", job.name.c_str(), status);
            return false;
        }
    out.clear();
    for (const auto& [at, count] : job.results) out.insert(out.end(), at, at + count);
    return true;
}

bool agree(const Job& job, const std::vector<float>& a, const std::vector<float>& b, double tolerance, const char* what) {
    for (size_t i = 0; i < a.size(); ++i) {
        const double gap = std::abs(double(a[i]) - double(b[i]));
        const bool equal = memcmp(&a[i], &b[i], 4) == 0;
        if (!equal && !(gap <= tolerance * (1.0 + std::abs(double(a[i]))))) {
            printf("%s: %s differ at %zu: %g and %g\n", job.name.c_str(), what, i, a[i], b[i]);
            return false;
        }
    }
    return true;
}

// Every row of a product once more, alone.
bool alone(Job& job, fr_context* context, const std::vector<float>& whole) {
    if (job.op.code != FR_MATMUL || !job.more.empty()) return true;
    const int K = job.op.i[0], N = job.op.i[1], rows = job.sizes[FR_N];
    auto* x = static_cast<float*>(job.table[size_t(job.op.t[0])]);
    job.sizes[FR_N] = 1;
    std::vector<float> out;
    bool good = true;
    for (int row = 0; row < rows && good; ++row) {
        job.table[size_t(job.op.t[0])] = x + int64_t(row) * K;
        job.results[0].second = size_t(N);
        good = run(job, context, out) && agree(job, {whole.begin() + int64_t(row) * N, whole.begin() + int64_t(row + 1) * N}, out, 0, "a row alone and among others");
    }
    return good;
}

// Whether this form must make the same bits as any other that can say so.
bool exact(const Job& job, const std::string& isa) {
#if defined(__x86_64__)
    if (isa == "scalar") return false;  // it multiplies, then adds
#endif
    const bool dots = isa == "amx" || (isa.size() > 4 && isa.substr(isa.size() - 4) == "bf16");
    const auto fuses = [](const fr_op& op) {
        if (op.code == FR_MLP) return op.i[2] != 1 && op.i[5] != 1;
        return op.code == FR_ATTENTION ? op.i[4] != 1 : op.code != FR_MATMUL || op.i[2] != 1;
    };
    return !dots || (fuses(job.op) && std::all_of(job.more.begin(), job.more.end(), fuses));
}

// What a machine has decides, and only that: without tiles all other forms serve, in their order.
bool chosen() {
    fr::Machine all;
    all.avx2 = all.avx512 = all.avx512bf16 = all.amx = all.tiles = all.neonbf16 = true;
    const auto with = fr::forms(all);
    bool good = !with.empty() && !strcmp(with.back()->name, "scalar");
    for (bool fr::Machine::*missing : {&fr::Machine::amx, &fr::Machine::tiles}) {
        fr::Machine has = all;
        has.*missing = false;
        std::vector<const fr::Kernels*> expected;
        for (const fr::Kernels* form : with)
            if (strcmp(form->name, "amx")) expected.push_back(form);
        good = good && fr::forms(has) == expected;
    }
    const auto none = fr::forms({});
    good = good && strcmp(none[0]->name, "amx");
    if (!good) printf("the wrong forms are chosen\n");
    return good;
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 150;
    std::vector<fr_context*> one, three;
    for (int i = 0; const char* name = fr_isas(i); ++i) {
        one.push_back(fr_open(1, name));
        three.push_back(fr_open(3, name));
    }
    Job (*const kinds[])() = {product, codes, mlp, attention, rows, rotation, mixture, choice, keep, write, heads, before_attention};
    int failures = !chosen(), count = 0;
    for (int round = 0; round < rounds; ++round)
        for (auto kind : kinds) {
            const auto seed = dice;
            std::vector<float> first, again, scalar, fused;
            for (size_t i = one.size(); i-- > 0;) {  // ops that work in place get their operands anew
                dice = seed;
                Job job = kind();
                failures += !run(job, one[i], first);
                dice = seed;
                job = kind();
                failures += !run(job, three[i], again) || !agree(job, first, again, 0, "one and three threads");
                if (!job.more.empty()) {
                    dice = seed;
                    job = kind();
                    failures += !run(job, one[i], again, true) || !agree(job, first, again, 0, "ops together and apart");
                }
                if (i + 1 == one.size()) scalar = first;
                failures += !agree(job, scalar, first, job.tolerance, "instruction sets");
                if (exact(job, fr_isa(one[i]))) {
                    if (fused.empty()) fused = first;
                    failures += !agree(job, fused, first, 0, "forms that fuse multiply-add");
                }
                failures += !alone(job, one[i], first);
                ++count;
            }
        }
    for (fr_context* context : one) fr_close(context);
    for (fr_context* context : three) fr_close(context);
    printf("%d cases on", count);
    for (int i = 0; const char* name = fr_isas(i); ++i) printf(" %s", name);
    printf(": %d failures\n", failures);
    return failures != 0;
}
