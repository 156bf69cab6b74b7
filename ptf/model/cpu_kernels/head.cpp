// Log-probs of an output projection in bf16, with their gradients and the entropies: the three products, in which the CPU multiplies
// bf16 and adds in fp32 (AVX512-BF16), and what lies between them, while a block of the vocabulary is in the cache.
//
// A first pass computes the logits of each block, and keeps their exponentials, relative to a position's largest in the
// block, in bf16. A second one, when the sums over the vocabulary are known, makes gradients of them and multiplies.
// Logits and sums are in fp32. Sums are added in one order, however many threads there are.

#include <omp.h>

#include <cstdlib>

#include "vectors.h"

#ifdef MULTIPLIES_PAIRS
namespace {

constexpr long BLOCK = 256;  // tokens of the vocabulary

struct Memory {  // several arrays of one allocation
    uintptr_t at = 0;
    long size = 0;
    template <typename T>
    T *take(long count) {
        T *found = reinterpret_cast<T *>(at + size);
        size += up(sizeof(T) * count, 64);
        return found;
    }
};

struct Head {
    const bf16 *x, *weight;    // [rows, width], [tokens, width]
    const int64_t *targets;    // [rows]
    const float *weights;      // [rows], or none if there are no gradients
    long rows, width, tokens;  // tokens of the vocabulary
    long lanes() const { return up(rows, PANEL); }
    long blocks() const { return up(tokens, BLOCK) / BLOCK; }
    long first(long block) const { return block * BLOCK; }
    long count(long block) const { return least(tokens - first(block), BLOCK); }
};

struct Buffers {
    pair *across, *along;         // x as products along its width and along its rows read it, in panels
    float *most, *total, *bent;   // of the positions in a block [blocks, lanes]: largest logit, Σ eᵈ and Σ d·eᵈ, where
    float *found;                 // d is a logit less the largest; the targets' logits [lanes]
    float *dx;                    // [lanes, width]
    bf16 *kept;                   // exponentials [tokens, lanes]
    Buffers(const Head &h, bf16 *kept, Memory &m) : kept(kept) {
        across = m.take<pair>(h.lanes() * h.width / 2), along = m.take<pair>(h.lanes() * h.width / 2);
        most = m.take<float>(h.blocks() * h.lanes()), total = m.take<float>(h.blocks() * h.lanes());
        bent = m.take<float>(h.blocks() * h.lanes()), found = m.take<float>(h.lanes()), dx = m.take<float>(h.lanes() * h.width);
    }
};

struct Slot {  // of a thread, or of the block that it has
    float *logits;  // [BLOCK, PANEL]
    bf16 *grads;    // [BLOCK, lanes]
    pair *turned, *weight;  // gradients as pairs of tokens [BLOCK / 2, stride]; the weight as such, in panels
    long stride;            // no multiple of a page, whose lines would take each other's places in a cache
    Slot(const Head &h, Memory &m) : stride(h.lanes() + WIDTH) {
        logits = m.take<float>(BLOCK * PANEL), grads = m.take<bf16>(BLOCK * h.lanes());
        turned = m.take<pair>(BLOCK / 2 * stride), weight = m.take<pair>(BLOCK / 2 * h.width);
    }
};

// x as [lanes / PANEL, width / 2, PANEL] pairs along the width; zeros where there is no row.
void set_across(const Head &h, pair *out) {
    const long depth = h.width / 2;
    memset(out, 0, sizeof(pair) * depth * h.lanes());
    for (long r = 0; r < h.rows; r++)
        for (long k = 0; k < depth; k++)
            out[(r / PANEL * depth + k) * PANEL + r % PANEL] = pairs(h.x + r * h.width)[k];
}

// A block's exponentials, if they are kept; and each position's largest logit, sums, and target's logit if it is here.
void exponentials(const Head &h, long block, const Buffers &b, float *logits) {
    const long depth = h.width / 2, n = h.count(block), lanes = h.lanes(), first = h.first(block);
    for (long r = 0; r < lanes; r += PANEL) {
        columns<2, false>(n, pairs(h.weight + first * h.width), depth, 1, b.across + r * depth, PANEL, logits, PANEL,
                          depth);
        for (long i = r; i < r + PANEL && i < h.rows; i++)
            if (const long t = h.targets[i] - first; t >= 0 && t < n) b.found[i] = logits[t * PANEL + i - r];
        vec high[2] = {load(logits), load(logits + WIDTH)}, added[2] = {}, bent[2] = {};
        for (long t = 1; t < n; t++)
            for (long i = 0; i < 2; i++) high[i] = larger(high[i], load(logits + t * PANEL + i * WIDTH));
        for (long t = 0; t < n; t++) {
            vec e[2];
            for (long i = 0; i < 2; i++) {
                const vec below = load(logits + t * PANEL + i * WIDTH) - high[i];
                added[i] += e[i] = exponential(below);
                bent[i] += below * e[i];
            }
            if (b.kept) _mm512_stream_si512((__m512i *)(b.kept + (first + t) * lanes + r), panel(e[0], e[1]));
        }
        for (long i = 0; i < 2; i++) {
            store(b.most + block * lanes + r + i * WIDTH, high[i]);
            store(b.total + block * lanes + r + i * WIDTH, added[i]);
            store(b.bent + block * lanes + r + i * WIDTH, bent[i]);
        }
    }
    _mm_sfence();  // other threads may read what was streamed
}

// The targets' log-probs, and the entropies. `most` becomes what turns a block's exponentials into gradients.
void normalise(const Head &h, const Buffers &b, float *logprobs, float *entropies) {
    const long lanes = h.lanes();
    for (long r = 0; r < lanes; r += WIDTH) {
        vec most = load(b.most + r), total{}, bent{};
        for (long block = 1; block < h.blocks(); block++) most = larger(most, load(b.most + block * lanes + r));
        for (long block = 0; block < h.blocks(); block++) {
            const long at = block * lanes + r;
            const vec below = load(b.most + at) - most, here = load(b.total + at), scale = exponential(below);
            total += here * scale;
            bent += (load(b.bent + at) + here * below) * scale;
        }
        float weights[WIDTH] = {};
        for (long i = r; i < r + WIDTH && i < h.rows; i++) {
            const float log_total = logf(total[i - r]);
            logprobs[i] = b.found[i] - most[i - r] - log_total;
            entropies[i] = log_total - bent[i - r] / total[i - r];
            if (h.weights) weights[i - r] = h.weights[i];
        }
        const vec factor = load(weights) / total;
        for (long block = 0; block < h.blocks(); block++) {
            float *at = b.most + block * lanes + r;
            store(at, factor * exponential(load(at) - most));
        }
    }
}

// A block's gradients of its logits, in both forms.
void gradients(const Head &h, long block, const Buffers &b, const float *logprobs, const Slot &s) {
    const long lanes = h.lanes(), first = h.first(block), n = h.count(block);
    for (long t = 0; t < n; t += 2) {
        const bf16 *early = b.kept + (first + t) * lanes, *late = t + 1 < n ? early + lanes : nullptr;
        for (long r = 0; r < lanes; r += PANEL) {
            const float *factors = b.most + block * lanes + r;
            const auto weighted = [=](const bf16 *at) {
                __builtin_prefetch(at + r + AHEAD * lanes);
                const __m512i e = panel(at + r);
                return panel(low(e) * load(factors), high(e) * load(factors + WIDTH));
            };
            const __m512i one = weighted(early), other = late ? weighted(late) : __m512i{};
            _mm512_storeu_si512(s.grads + t * lanes + r, one);
            if (late) _mm512_storeu_si512(s.grads + (t + 1) * lanes + r, other);
            interleave(one, other, s.turned + t / 2 * s.stride + r);
        }
    }
    for (long r = 0; r < h.rows; r++) {
        const long t = h.targets[r] - first;
        if (t < 0 || t >= n) continue;
        const bf16 at_target = {(uint16_t)nearest(all((expf(logprobs[r]) - 1.0f) * h.weights[r]))[0]};
        s.grads[t * lanes + r] = at_target;
        reinterpret_cast<bf16 *>(s.turned + t / 2 * s.stride + r)[t % 2] = at_target;
    }
}

// A block's rows of the weight's gradient: added to `sums`, unless these are all rows, and if complete, to `out` in bf16.
template <bool ADD>
void of_weight(const Head &h, long block, const Buffers &b, const Slot &s, float *sums, bf16 *out) {
    const long depth = h.lanes() / 2, n = h.count(block), at = h.first(block) * h.width;
    for (long i = 0; i < h.width; i += PANEL) {
        float *part = sums ? sums + at + i : s.logits;
        const long row = sums ? h.width : PANEL;
        columns<2, ADD>(n, pairs(s.grads), depth, 1, b.along + i * depth, PANEL, part, row, depth);
        for (long t = 0; out && t < n; t++)
            _mm512_stream_si512((__m512i *)(out + at + t * h.width + i),
                                panel(part + t * row));
    }
    _mm_sfence();
}

// A block's part of the gradient of x [lanes, width] for `share` of its rows.
void of_x(const Head &h, long block, const Buffers &b, const Slot &s, long first, long share) {
    const long rows = least(h.lanes() - first, share);
    for (long i = 0; i < h.width && rows > 0; i += PANEL)
        columns<2, true>(rows, s.turned + first, 1, s.stride, s.weight + i * BLOCK / 2, PANEL,
                         b.dx + first * h.width + i, h.width, (h.count(block) + 1) / 2);
}

void compute(const Head &h, const Buffers &b, const Slot *slots, float *logprobs, float *entropies, bf16 *dx,
             float *sums, bf16 *dweight, bool first, long threads) {
    const long lanes = h.lanes(), share = up(up(lanes, ROWS) / ROWS, threads) / threads * ROWS;
    set_across(h, b.across);
    memset(b.along, 0, sizeof(bf16) * h.width * lanes);
    along(h.x, h.rows, h.width, h.width, lanes / 2, PANEL, b.along);
    memset(b.dx, 0, sizeof(float) * lanes * h.width);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (long block = 0; block < h.blocks(); block++)
            exponentials(h, block, b, slots[omp_get_thread_num()].logits);
#pragma omp single
        normalise(h, b, logprobs, entropies);
        for (long from = 0; h.weights && from < h.blocks(); from += threads) {
            const long to = least(from + threads, h.blocks());
#pragma omp for
            for (long block = from; block < to; block++) {
                const Slot &s = slots[block - from];
                gradients(h, block, b, logprobs, s);
                if (dx) along(h.weight + h.first(block) * h.width, h.count(block), h.width, h.width, BLOCK / 2, PANEL, s.weight);
                if (sums && !first) of_weight<true>(h, block, b, s, sums, dweight);
                else if (sums || dweight) of_weight<false>(h, block, b, s, sums, dweight);
            }
#pragma omp for
            for (long thread = 0; thread < threads; thread++)
                for (long block = from; dx && block < to; block++)
                    of_x(h, block, b, slots[block - from], thread * share, share);
        }
    }
    if (dx)
        for (long i = 0; i < h.rows * h.width; i += WIDTH) store(dx + i, load(b.dx + i));
}

}  // namespace

// The targets' log-probs and the entropies [rows] of x [rows, width] under a head of so many `tokens` [tokens, width].
// With `weights` [rows], the gradients of −Σ weights · log-prob as well: that of x is written to `dx`; that of the weight
// is added to `sums`, which the `first` rows overwrite, and written to `dweight` after the last ones, without sums if the
// first are the last. What is null is not computed. `kept` and `dweight` begin at a multiple of 64 bytes. `kept`
// [tokens, rows as a multiple of PANEL] is scratch. Rows are at least one, and the width is a multiple of PANEL. 1
// without memory.
extern "C" int head_logprobs(const bf16 *x, const bf16 *weight, const int64_t *targets, const float *weights,
                         float *logprobs, float *entropies, bf16 *kept, bf16 *dx, float *sums, bf16 *dweight,
                         int64_t rows, int64_t width, int64_t tokens, int64_t first, int64_t threads) {
    const Head h = {x, weight, targets, weights, rows, width, tokens};
    Slot *slots = static_cast<Slot *>(malloc(sizeof(Slot) * threads));
    Memory counted, memory;
    Buffers(h, kept, counted);
    for (long i = 0; i < threads; i++) Slot(h, counted);
    void *place = aligned_alloc(64, counted.size);
    memory.at = reinterpret_cast<uintptr_t>(place);
    const bool failed = !slots || !place;
    if (!failed) {
        const Buffers b(h, weights ? kept : nullptr, memory);
        for (long i = 0; i < threads; i++) slots[i] = Slot(h, memory);
        compute(h, b, slots, logprobs, entropies, dx, sums, dweight, first, threads);
    }
    free(slots), free(place);
    return failed;
}
#endif
