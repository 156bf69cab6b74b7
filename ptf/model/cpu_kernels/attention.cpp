// Causal softmax attention inside each document of packed sequences, forward and backward, in fp32 on a CPU.
//
// No tensor of all scores is written (FlashAttention-2, Dao 2023): a block of queries meets its keys a chunk at a time.
// A document is a range of rows, and may continue a prefix, which is the beginning of an earlier document. Documents
// that share a prefix are a family. What a thread computes is a family with one head of keys: no two threads write to
// the same place, and the sums are added in one order, however many threads there are.

#include <cstdlib>

#include "vectors.h"

namespace {

constexpr long QUERIES = 24, KEYS = 256;  // of a block, whose scores stay in the cache
constexpr float START = -1e30f;           // of the running maximum
constexpr float MASKED = -3e38f;          // below START by more than any exponential counts

struct Document {
    int64_t start, length, prefix, shared;  // its rows; the first row of its prefix, and how many of them it shares
    long keys() const { return shared + length; }
    long row(long key) const { return key < shared ? prefix + key : start + key - shared; }
};

struct Shape {
    int64_t rows, heads, kv_heads, dim, window;  // a window of 0 is unlimited
    float scale;
    long group() const { return heads / kv_heads; }
};

long up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

// One head's keys or values: x [rows, heads, dim] at a document's rows, as [keys, dim], zeros up to a whole panel.
void gather(const float *x, long heads, long head, long dim, const Document &d, float *out) {
    for (long j = 0; j < d.keys(); j++)
        memcpy(out + j * dim, x + (d.row(j) * heads + head) * dim, sizeof(float) * dim);
    memset(out + d.keys() * dim, 0, sizeof(float) * dim * (up(d.keys(), PANEL) - d.keys()));
}

// x [keys, dim] in panels [keys / PANEL, dim, PANEL], which a tile reads in order.
void transpose(const float *x, long keys, long dim, float *out) {
    for (long first = 0; first < keys; first += PANEL, out += dim * PANEL)
        for (long d = 0; d < dim; d += 4)  // a cache line's part at a time
            for (long j = 0; j < PANEL; j++) {
                const float *from = x + (first + j) * dim + d;
                float *to = out + d * PANEL + j;
                to[0] = from[0], to[PANEL] = from[1], to[2 * PANEL] = from[2], to[3 * PANEL] = from[3];
            }
}

struct Block {  // of queries
    long first, rows, begin, end;  // its first query and how many they are; the keys that any of them attends to
    Block(const Document &d, const Shape &s, long at) : first(at) {
        rows = d.length - at < QUERIES ? d.length - at : QUERIES;
        end = d.shared + at + rows;
        const long lowest = s.window ? d.shared + at - s.window + 1 : 0;
        begin = lowest > 0 ? lowest / PANEL * PANEL : 0;
    }
};

// s [rows, KEYS] = q · k of a chunk of keys that begins at `from`, with MASKED where a query does not attend.
void scores(const Document &d, const Shape &s, const Block &b, long from, long width, const float *q,
            const float *panels, float *out) {
    for (long j = 0; j < width; j += PANEL)
        columns<2, false>(b.rows, q, s.dim, 1, panels + (from + j) * s.dim, PANEL, out + j, KEYS, s.dim);
    for (long r = 0; r < b.rows; r++) {
        const long query = d.shared + b.first + r - from, after = query + 1 > 0 ? query + 1 : 0;
        for (long j = after; j < width; j++) out[r * KEYS + j] = MASKED;
        if (s.window)
            for (long j = 0; j < width && j <= query - s.window; j++) out[r * KEYS + j] = MASKED;
    }
}

void forward(const Document &d, const Shape &s, long kv, const float *q, const float *k, const float *v,
             const float *sinks, float *out, float *lse, float *scratch) {
    const long dim = s.dim, padded = up(d.keys(), PANEL);
    float *values = scratch, *panels = values + padded * dim, *query = panels + padded * dim;
    float *p = query + QUERIES * dim, *o = p + QUERIES * KEYS;
    gather(k, s.kv_heads, kv, dim, d, values);
    transpose(values, d.keys(), dim, panels);
    gather(v, s.kv_heads, kv, dim, d, values);
    for (long head = kv * s.group(); head < (kv + 1) * s.group(); head++)
        for (long at = 0; at < d.length; at += QUERIES) {
            const Block b(d, s, at);
            float most[QUERIES], total[QUERIES];
            for (long r = 0; r < b.rows; r++) {
                const float *from = q + ((d.start + at + r) * s.heads + head) * dim;
                for (long i = 0; i < dim; i += WIDTH) {
                    store(query + r * dim + i, load(from + i) * s.scale);
                    store(o + r * dim + i, vec{});
                }
                most[r] = sinks ? sinks[head] : START, total[r] = sinks ? 1.0f : 0.0f;
            }
            for (long from = b.begin; from < b.end; from += KEYS) {
                const long width = up(b.end - from < KEYS ? b.end - from : KEYS, PANEL);
                scores(d, s, b, from, width, query, panels, p);
                for (long r = 0; r < b.rows; r++) {
                    float *row = p + r * KEYS;
                    vec high = load(row);
                    for (long j = WIDTH; j < width; j += WIDTH) high = larger(high, load(row + j));
                    const float found = largest(high);
                    if (found > most[r]) {
                        const float shrunk = exponential(all(most[r] - found))[0];
                        total[r] *= shrunk, most[r] = found;
                        for (long i = 0; i < dim; i += WIDTH) store(o + r * dim + i, load(o + r * dim + i) * shrunk);
                    }
                    vec added{};
                    for (long j = 0; j < width; j += WIDTH) {
                        const vec e = exponential(load(row + j) - most[r]);
                        store(row + j, e);
                        added += e;
                    }
                    total[r] += sum(added);
                }
                product<true>(b.rows, dim, width, p, KEYS, 1, values + from * dim, dim, o, dim);
            }
            for (long r = 0; r < b.rows; r++) {
                const long row = d.start + at + r;
                for (long i = 0; i < dim; i += WIDTH)
                    store(out + (row * s.heads + head) * dim + i, load(o + r * dim + i) / total[r]);
                lse[head * s.rows + row] = most[r] + logf(total[r]);
            }
        }
}

void backward(const Document &d, const Shape &s, long kv, const float *q, const float *k, const float *v,
              const float *out, const float *lse, const float *upstream, float *dq, float *dk, float *dv,
              float *deltas, float *scratch) {
    const long dim = s.dim, padded = up(d.keys(), PANEL), area = padded * dim;
    float *keys = scratch, *key_panels = keys + area, *value_panels = key_panels + area;
    float *of_keys = value_panels + area, *of_values = of_keys + area, *query = of_values + area;
    float *grad = query + QUERIES * dim, *of_query = grad + QUERIES * dim, *p = of_query + QUERIES * dim;
    float *ds = p + QUERIES * KEYS;
    gather(v, s.kv_heads, kv, dim, d, keys);
    transpose(keys, d.keys(), dim, value_panels);
    gather(k, s.kv_heads, kv, dim, d, keys);
    transpose(keys, d.keys(), dim, key_panels);
    memset(of_keys, 0, sizeof(float) * 2 * area);
    for (long head = kv * s.group(); head < (kv + 1) * s.group(); head++)
        for (long at = 0; at < d.length; at += QUERIES) {
            const Block b(d, s, at);
            float delta[QUERIES];
            for (long r = 0; r < b.rows; r++) {
                const long row = ((d.start + at + r) * s.heads + head) * dim;
                vec dot{};
                for (long i = 0; i < dim; i += WIDTH) {
                    store(query + r * dim + i, load(q + row + i) * s.scale);
                    store(grad + r * dim + i, load(upstream + row + i));
                    store(of_query + r * dim + i, vec{});
                    dot += load(upstream + row + i) * load(out + row + i);
                }
                delta[r] = deltas[head * s.rows + d.start + at + r] = sum(dot);
            }
            for (long from = b.begin; from < b.end; from += KEYS) {
                const long width = up(b.end - from < KEYS ? b.end - from : KEYS, PANEL);
                scores(d, s, b, from, width, query, key_panels, p);
                for (long j = 0; j < width; j += PANEL)
                    columns<2, false>(b.rows, grad, dim, 1, value_panels + (from + j) * dim, PANEL, ds + j, KEYS, dim);
                for (long r = 0; r < b.rows; r++) {
                    const float normaliser = lse[head * s.rows + d.start + at + r];
                    for (long j = r * KEYS; j < r * KEYS + width; j += WIDTH) {
                        const vec e = exponential(load(p + j) - normaliser);
                        store(p + j, e);
                        store(ds + j, e * (load(ds + j) - delta[r]));
                    }
                }
                product<true>(width, dim, b.rows, p, 1, KEYS, grad, dim, of_values + from * dim, dim);
                product<true>(width, dim, b.rows, ds, 1, KEYS, query, dim, of_keys + from * dim, dim);
                product<true>(b.rows, dim, width, ds, KEYS, 1, keys + from * dim, dim, of_query, dim);
            }
            for (long r = 0; r < b.rows; r++)
                for (long i = 0; i < dim; i += WIDTH)
                    store(dq + ((d.start + at + r) * s.heads + head) * dim + i, load(of_query + r * dim + i) * s.scale);
        }
    for (long j = 0; j < d.keys(); j++) {
        const long row = (d.row(j) * s.kv_heads + kv) * dim;
        for (long i = 0; i < dim; i += WIDTH) {  // a prefix was written with the document that it begins
            store(dk + row + i, load(of_keys + j * dim + i) + (j < d.shared ? load(dk + row + i) : vec{}));
            store(dv + row + i, load(of_values + j * dim + i) + (j < d.shared ? load(dv + row + i) : vec{}));
        }
    }
}

// Run `one(document, head of keys, scratch)` for all documents, whose families are threads' work; 1 without memory.
template <typename One>
int for_each(const Document *documents, const int64_t *families, long count, const Shape &s, long areas, long blocks,
             int64_t threads, One one) {
    long longest = 0;
    for (long i = 0; i < families[count]; i++)
        longest = documents[i].keys() > longest ? documents[i].keys() : longest;
    const long floats = areas * up(longest, PANEL) * s.dim + 3 * QUERIES * s.dim + blocks * QUERIES * KEYS;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *scratch = static_cast<float *>(aligned_alloc(64, up(sizeof(float) * floats, 64)));
        failed = scratch == nullptr;
#pragma omp for schedule(dynamic)
        for (long task = 0; task < count * s.kv_heads; task++)
            for (long i = families[task / s.kv_heads]; scratch && i < families[task / s.kv_heads + 1]; i++)
                one(documents[i], task % s.kv_heads, scratch);
        free(scratch);
    }
    return failed;
}

}  // namespace

// q, out, upstream and dq are [rows, heads, dim], k, v, dk and dv [rows, kv_heads, dim], lse and deltas [heads, rows],
// sinks [heads] or null. `documents` are [n, 4] in the order of `families` [count + 1], which holds where each begins.
extern "C" int attention_forward(const float *q, const float *k, const float *v, const float *sinks, float *out,
                                 float *lse, const int64_t *documents, const int64_t *families, int64_t count,
                                 int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window,
                                 float scale, int64_t threads) {
    const Shape s{rows, heads, kv_heads, dim, window, scale};
    return for_each(reinterpret_cast<const Document *>(documents), families, count, s, 2, 1, threads,
                    [=](const Document &d, long kv, float *scratch) {
                        forward(d, s, kv, q, k, v, sinks, out, lse, scratch);
                    });
}

extern "C" int attention_backward(const float *q, const float *k, const float *v, const float *out, const float *lse,
                                  const float *upstream, float *dq, float *dk, float *dv, float *deltas,
                                  const int64_t *documents, const int64_t *families, int64_t count, int64_t rows,
                                  int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, float scale,
                                  int64_t threads) {
    const Shape s{rows, heads, kv_heads, dim, window, scale};
    return for_each(reinterpret_cast<const Document *>(documents), families, count, s, 5, 2, threads,
                    [=](const Document &d, long kv, float *scratch) {
                        backward(d, s, kv, q, k, v, out, lse, upstream, dq, dk, dv, deltas, scratch);
                    });
}

extern "C" int vector_width() { return WIDTH; }

extern "C" const char *compiler() {
#if defined(__clang__)
    return "Clang " __clang_version__;
#else
    return "GCC " __VERSION__;
#endif
}
