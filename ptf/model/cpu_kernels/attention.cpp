// Causal softmax attention inside each document of packed sequences, forward and backward, in fp32 or bf16 on a CPU.
//
// Numbers in bf16 are multiplied as they are where the CPU can do so (AVX512-BF16), with probabilities and their
// gradients rounded to bf16, and elsewhere in fp32; sums, maxima and exponentials are in fp32.
//
// No tensor of all scores is written (FlashAttention-2, Dao 2023): a block of queries meets its keys a chunk at a time.
// A document is a range of rows, and may continue a prefix, which is the beginning of an earlier document. Documents
// that share a prefix are a family. What a thread computes is a family with one head of keys: no two threads write to
// the same place, and the sums are added in one order, however many threads there are.

#include <cstdlib>
#include <type_traits>

#include "vectors.h"

namespace {

constexpr long KEYS = 256;        // of a chunk, whose scores stay in the cache with those of a block of queries
constexpr float START = -1e30f;   // of the running maximum
constexpr float MASKED = -INFINITY;

// E is what numbers are multiplied as, float or bf16; an operand of a product holds DEEP of them.
template <typename E>
using Operand = std::conditional_t<std::is_same_v<E, float>, float, pair>;
template <typename E>
constexpr long DEEP = sizeof(float) / sizeof(E);
template <typename E>
constexpr long QUERIES = 24 * DEEP<E>;  // of a block, which is the depth of two products

template <typename E>
Operand<E> *operands(E *x) {
    return reinterpret_cast<Operand<E> *>(x);
}

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

struct Scratch {
    char *at;
    template <typename T>
    T *take(long count) {
        T *found = reinterpret_cast<T *>(at);
        at += count * sizeof(T);
        return found;
    }
};

template <typename T, typename E>
void copy(const T *from, E *to, long count) {
    for (long i = 0; i < count; i += WIDTH) {
        if constexpr (std::is_same_v<T, E>) memcpy(to + i, from + i, sizeof(T) * WIDTH);  // an instruction
        else store(to + i, load(from + i));
    }
}

// One head's keys or values: x [rows, heads, dim] at a document's rows, as [keys, dim], zeros up to a whole panel.
template <typename T, typename E>
void gather(const T *x, long heads, long head, long dim, const Document &d, E *out) {
    for (long j = 0; j < d.keys(); j++) copy(x + (d.row(j) * heads + head) * dim, out + j * dim, dim);
    memset(out + d.keys() * dim, 0, sizeof(E) * dim * (up(d.keys(), PANEL) - d.keys()));
}

// x [keys, depth] in panels [keys / PANEL, depth, PANEL], which a tile reads in order.
template <typename O>
void transpose(const O *x, long keys, long depth, O *out) {
    for (long first = 0; first < keys; first += PANEL, out += depth * PANEL)
        for (long d = 0; d < depth; d += 4)  // a cache line's part at a time
            for (long j = 0; j < PANEL; j++) {
                const O *from = x + (first + j) * depth + d;
                O *to = out + d * PANEL + j;
                to[0] = from[0], to[PANEL] = from[1], to[2 * PANEL] = from[2], to[3 * PANEL] = from[3];
            }
}

// x [rows, dim] as operands whose depth is the rows: itself, or pairs of rows [rows / 2, dim] in `out`.
float *along_rows(float *x, long, long, float *) { return x; }
pair *along_rows(bf16 *x, long rows, long dim, bf16 *out) {
    for (long r = 0; r < rows; r += 2)
        for (long i = 0; i < dim; i += WIDTH) {
            const vec second = r + 1 < rows ? load(x + (r + 1) * dim + i) : vec{};
            store(reinterpret_cast<float *>(out + r * dim) + i, paired(load(x + r * dim + i), second));
        }
    return operands(out);
}

struct Block {  // of queries
    long first, rows, begin, end;  // its first query and how many they are; the keys that any of them attends to
    Block(const Document &d, const Shape &s, long at, long most) : first(at) {
        rows = d.length - at < most ? d.length - at : most;
        end = d.shared + at + rows;
        const long lowest = s.window ? d.shared + at - s.window + 1 : 0;
        begin = lowest > 0 ? lowest / PANEL * PANEL : 0;
    }
};

// out [rows, KEYS] = q · k of a chunk of keys that begins at `from`, with MASKED where a query does not attend.
template <typename O>
void scores(const Document &d, const Shape &s, const Block &b, long from, long width, const O *q, const O *panels,
            long depth, float *out) {
    for (long j = 0; j < width; j += PANEL)
        columns<2, false>(b.rows, q, depth, 1, panels + (from + j) * depth, PANEL, out + j, KEYS, depth);
    for (long r = 0; r < b.rows; r++) {
        const long query = d.shared + b.first + r - from, after = query + 1 > 0 ? query + 1 : 0;
        for (long j = after; j < width; j++) out[r * KEYS + j] = MASKED;
        if (s.window)
            for (long j = 0; j < width && j <= query - s.window; j++) out[r * KEYS + j] = MASKED;
    }
}

template <typename E, typename T>
void forward(const Document &d, const Shape &s, long kv, const T *q, const T *k, const T *v, const float *sinks, T *out,
             float *lse, Scratch scratch) {
    const long dim = s.dim, area = up(d.keys(), PANEL) * dim, depth = dim / DEEP<E>;
    E *rows = scratch.take<E>(area), *panels = scratch.take<E>(area), *turned = scratch.take<E>(area * (DEEP<E> - 1));
    E *query = scratch.take<E>(QUERIES<E> * dim);
    float *o = scratch.take<float>(QUERIES<E> * dim), *p = scratch.take<float>(QUERIES<E> * KEYS);
    gather(k, s.kv_heads, kv, dim, d, rows);
    transpose(operands(rows), d.keys(), depth, operands(panels));
    gather(v, s.kv_heads, kv, dim, d, rows);
    const auto *values = along_rows(rows, area / dim, dim, turned);
    for (long head = kv * s.group(); head < (kv + 1) * s.group(); head++)
        for (long at = 0; at < d.length; at += QUERIES<E>) {
            const Block b(d, s, at, QUERIES<E>);
            float most[QUERIES<E>], total[QUERIES<E>];
            for (long r = 0; r < b.rows; r++) {
                copy(q + ((d.start + at + r) * s.heads + head) * dim, query + r * dim, dim);
                most[r] = sinks ? sinks[head] : START, total[r] = sinks ? 1.0f : 0.0f;
            }
            memset(o, 0, sizeof(float) * b.rows * dim);
            for (long from = b.begin; from < b.end; from += KEYS) {
                const long width = up(b.end - from < KEYS ? b.end - from : KEYS, PANEL);
                scores(d, s, b, from, width, operands(query), operands(panels), depth, p);
                for (long r = 0; r < b.rows; r++) {
                    float *row = p + r * KEYS;
                    vec high = load(row);
                    for (long j = WIDTH; j < width; j += WIDTH) high = larger(high, load(row + j));
                    const float found = largest(high) * s.scale;
                    if (found > most[r]) {
                        if (total[r] > 0) {
                            const float shrunk = exponential(all(most[r] - found))[0];
                            total[r] *= shrunk;
                            for (long i = r * dim; i < (r + 1) * dim; i += WIDTH) store(o + i, load(o + i) * shrunk);
                        }
                        most[r] = found;
                    }
                    vec added{};
                    for (long j = 0; j < width; j += WIDTH) {
                        const vec e = exponential(load(row + j) * s.scale - most[r]);
                        store(reinterpret_cast<E *>(row) + j, e);  // over scores that were read
                        added += e;
                    }
                    total[r] += sum(added);
                }
                product<true>(b.rows, dim, width / DEEP<E>, operands(reinterpret_cast<E *>(p)), KEYS, 1,
                              values + from / DEEP<E> * dim, dim, o, dim);
            }
            for (long r = 0; r < b.rows; r++) {
                const long row = d.start + at + r;
                for (long i = 0; i < dim; i += WIDTH)
                    store(out + (row * s.heads + head) * dim + i, load(o + r * dim + i) / total[r]);
                lse[head * s.rows + row] = most[r] + logf(total[r]);
            }
        }
}

// Probabilities p and the gradients ds of their logarithms, over scores and their gradients [rows, width]: as operands
// along the rows, and ds also as they lie, [rows, KEYS]. Returns the latter.
template <typename E>
Operand<E> *probabilities(float *p, float *ds, E *flat, const float *lse, const float *delta, float scale,
                          long rows, long width) {
    for (long r = 0; r < rows; r += DEEP<E>)
        for (long j = r * KEYS; j < r * KEYS + width; j += WIDTH) {
            vec e[2]{}, g[2]{};
            for (long i = 0; i < DEEP<E> && r + i < rows; i++) {
                e[i] = exponential(load(p + i * KEYS + j) * scale - lse[r + i]);
                g[i] = e[i] * (load(ds + i * KEYS + j) - delta[r + i]);
            }
            store(p + j, DEEP<E> == 1 ? e[0] : paired(e[0], e[1]));
            store(ds + j, DEEP<E> == 1 ? g[0] : paired(g[0], g[1]));
            if (DEEP<E> > 1) store(flat + j, g[0]), store(flat + KEYS + j, g[1]);
        }
    return operands(DEEP<E> == 1 ? reinterpret_cast<E *>(ds) : flat);
}

template <typename E, typename T>
void backward(const Document &d, const Shape &s, long kv, const T *q, const T *k, const T *v, const T *out,
              const float *lse, const T *upstream, T *dq, float *dk, float *dv, float *deltas, Scratch scratch) {
    const long dim = s.dim, area = up(d.keys(), PANEL) * dim, depth = dim / DEEP<E>, other = DEEP<E> - 1;
    constexpr long most = QUERIES<E>;
    float *of_keys = scratch.take<float>(area), *of_values = scratch.take<float>(area);
    E *rows = scratch.take<E>(area), *turned = scratch.take<E>(area * other);
    E *key_panels = scratch.take<E>(area), *value_panels = scratch.take<E>(area);
    float *of_query = scratch.take<float>(most * dim);
    E *query = scratch.take<E>(most * dim), *turned_query = scratch.take<E>(most * dim * other);
    E *grad = scratch.take<E>(most * dim), *turned_grad = scratch.take<E>(most * dim * other);
    float *p = scratch.take<float>(most * KEYS), *ds = scratch.take<float>(most * KEYS);
    E *flat = scratch.take<E>(most * KEYS * other);
    gather(v, s.kv_heads, kv, dim, d, rows);
    transpose(operands(rows), d.keys(), depth, operands(value_panels));
    gather(k, s.kv_heads, kv, dim, d, rows);
    transpose(operands(rows), d.keys(), depth, operands(key_panels));
    const auto *keys = along_rows(rows, area / dim, dim, turned);
    memset(of_keys, 0, sizeof(float) * 2 * area);
    for (long head = kv * s.group(); head < (kv + 1) * s.group(); head++)
        for (long at = 0; at < d.length; at += most) {
            const Block b(d, s, at, most);
            float delta[most], normaliser[most];
            for (long r = 0; r < b.rows; r++) {
                const long row = ((d.start + at + r) * s.heads + head) * dim, place = head * s.rows + d.start + at + r;
                copy(q + row, query + r * dim, dim);
                copy(upstream + row, grad + r * dim, dim);
                vec dot{};
                for (long i = 0; i < dim; i += WIDTH) dot += load(upstream + row + i) * load(out + row + i);
                delta[r] = deltas[place] = sum(dot), normaliser[r] = lse[place];
            }
            memset(of_query, 0, sizeof(float) * b.rows * dim);
            const auto *queries = along_rows(query, b.rows, dim, turned_query);
            const auto *grads = along_rows(grad, b.rows, dim, turned_grad);
            for (long from = b.begin; from < b.end; from += KEYS) {
                const long width = up(b.end - from < KEYS ? b.end - from : KEYS, PANEL), step = DEEP<E> * KEYS;
                scores(d, s, b, from, width, operands(query), operands(key_panels), depth, p);
                for (long j = 0; j < width; j += PANEL)
                    columns<2, false>(b.rows, operands(grad), depth, 1, operands(value_panels) + (from + j) * depth,
                                      PANEL, ds + j, KEYS, depth);
                const auto *by_row = probabilities(p, ds, flat, normaliser, delta, s.scale, b.rows, width);
                const auto *weights = operands(reinterpret_cast<E *>(p));
                const auto *of_scores = operands(reinterpret_cast<E *>(ds));
                const long deep = up(b.rows, DEEP<E>) / DEEP<E>;
                product<true>(width, dim, deep, weights, 1, step, grads, dim, of_values + from * dim, dim);
                product<true>(width, dim, deep, of_scores, 1, step, queries, dim, of_keys + from * dim, dim);
                product<true>(b.rows, dim, width / DEEP<E>, by_row, KEYS / DEEP<E>, 1, keys + from / DEEP<E> * dim,
                              dim, of_query, dim);
            }
            for (long r = 0; r < b.rows; r++)
                for (long i = 0; i < dim; i += WIDTH)
                    store(dq + ((d.start + at + r) * s.heads + head) * dim + i, load(of_query + r * dim + i) * s.scale);
        }
    for (long j = 0; j < d.keys(); j++) {
        const long row = (d.row(j) * s.kv_heads + kv) * dim;
        for (long i = 0; i < dim; i += WIDTH) {  // a prefix was written with the document that it begins
            const vec of_key = load(of_keys + j * dim + i) * s.scale, of_value = load(of_values + j * dim + i);
            store(dk + row + i, of_key + (j < d.shared ? load(dk + row + i) : vec{}));
            store(dv + row + i, of_value + (j < d.shared ? load(dv + row + i) : vec{}));
        }
    }
}

// Run `one(document, head of keys, scratch)` for all documents, whose families are threads' work; 1 without memory.
// `areas` and `blocks`: the most floats of scratch for a dimension of a key, and for a score.
template <typename E, typename One>
int for_each(const Document *documents, const int64_t *families, long count, const Shape &s, long areas, long blocks,
             int64_t threads, One one) {
    long longest = 0;
    for (long i = 0; i < families[count]; i++)
        longest = documents[i].keys() > longest ? documents[i].keys() : longest;
    const long floats = (areas * up(longest, PANEL) + 3 * QUERIES<E>) * s.dim + blocks * QUERIES<E> * KEYS;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        char *scratch = static_cast<char *>(aligned_alloc(64, up(sizeof(float) * floats, 64)));
        failed = scratch == nullptr;
#pragma omp for schedule(dynamic)
        for (long task = 0; task < count * s.kv_heads; task++)
            for (long i = families[task / s.kv_heads]; scratch && i < families[task / s.kv_heads + 1]; i++)
                one(documents[i], task % s.kv_heads, Scratch{scratch});
        free(scratch);
    }
    return failed;
}

}  // namespace

// q, out, upstream and dq are [rows, heads, dim], k, v, dk and dv [rows, kv_heads, dim], lse and deltas [heads, rows],
// sinks [heads] or null. `documents` are [n, 4] in the order of `families` [count + 1], which holds where each begins.
#define FOR(name, T, E)                                                                                               \
    extern "C" int attention_##name(const T *q, const T *k, const T *v, const float *sinks, T *out, float *lse,        \
                                    const int64_t *documents, const int64_t *families, int64_t count, int64_t rows,   \
                                    int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, float scale,        \
                                    int64_t threads) {                                                                \
        const Shape s{rows, heads, kv_heads, dim, window, scale};                                                     \
        const auto *found = reinterpret_cast<const Document *>(documents);                                            \
        return for_each<E>(found, families, count, s, 2, 1, threads, [=](const Document &d, long kv, Scratch at) {     \
            forward<E>(d, s, kv, q, k, v, sinks, out, lse, at);                                                       \
        });                                                                                                           \
    }                                                                                                                 \
    extern "C" int attention_backward_##name(                                                                         \
        const T *q, const T *k, const T *v, const T *out, const float *lse, const T *upstream, T *dq, float *dk,      \
        float *dv, float *deltas, const int64_t *documents, const int64_t *families, int64_t count, int64_t rows,     \
        int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, float scale, int64_t threads) {                 \
        const Shape s{rows, heads, kv_heads, dim, window, scale};                                                     \
        const auto *found = reinterpret_cast<const Document *>(documents);                                            \
        return for_each<E>(found, families, count, s, 5, 3, threads, [=](const Document &d, long kv, Scratch at) {     \
            backward<E>(d, s, kv, q, k, v, out, lse, upstream, dq, dk, dv, deltas, at);                               \
        });                                                                                                           \
    }
FOR(float, float, float)
FOR(bf16, bf16, Narrow)

extern "C" int vector_width() { return WIDTH; }

extern "C" int multiplies_bf16() { return sizeof(Narrow) == sizeof(bf16); }

extern "C" const char *compiler() {
#if defined(__clang__)
    return "Clang " __clang_version__;
#else
    return "GCC " __VERSION__;
#endif
}
