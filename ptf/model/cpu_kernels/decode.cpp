// Attention of one new token of each response to its context, which several responses may share, and to its own tokens.
//
// Keys and values are read once where they lie, in fp32. A response is computed by itself, so its bits depend neither on
// other responses nor on the number of threads.

#include <omp.h>

#include <cstdlib>

#include "vectors.h"

namespace {

constexpr long KEYS = 4;  // that a query is multiplied with together

struct Place {  // which context a response has; what it attends to there, and of its own tokens
    int64_t context, from, to, own_from, own_to;
};

struct Tokens {  // keys and values of a head that a query attends to
    const float *keys, *values;
    long count;
};

// Products of the queries [group, dim] and the keys, scaled, with `stride` between those of two queries.
void multiply(const float *queries, long group, const Tokens &t, long dim, float scale, float *out, long stride) {
    for (long g = 0; g < group; g++)
        for (long first = 0; first < t.count; first += KEYS) {
            const long n = least(t.count - first, KEYS);
            vec total[KEYS] = {};
            for (long i = 0; i < dim; i += WIDTH) {
                const vec query = load(queries + g * dim + i);
                for (long k = 0; k < KEYS; k++) total[k] += query * load(t.keys + (first + least(k, n - 1)) * dim + i);
            }
            for (long k = 0; k < n; k++) out[g * stride + first + k] = scale * sum(total[k]);
        }
}

// The softmax of `count` scores in place, among which a sink takes its part.
void normalise(float *scores, long count, const float *sink) {
    const long all_of_them = up(count, WIDTH);
    for (long i = count; i < all_of_them; i++) scores[i] = -INFINITY;
    vec most = all(sink ? *sink : -INFINITY), total{};
    for (long i = 0; i < all_of_them; i += WIDTH) most = larger(most, load(scores + i));
    const float high = largest(most);
    for (long i = 0; i < all_of_them; i += WIDTH) {
        const vec e = exponential(load(scores + i) - high);
        total += e;
        store(scores + i, e);
    }
    const float whole = sum(total) + (sink ? expf(*sink - high) : 0.0f);
    for (long i = 0; i < all_of_them; i += WIDTH) store(scores + i, load(scores + i) / whole);
}

}  // namespace

// The output [n, heads, value_dim] for queries [n, heads, dim] of n responses at these places. Contexts have keys and
// values [contexts, kv_heads, longest, ·], or are null if no response attends to one; the responses' own are
// [n, kv_heads, own, ·]. `sinks` [heads] may be null. Both dims are multiples of WIDTH. 1 without memory.
extern "C" int decode(const float *queries, const float *context_keys, const float *context_values,
                      const float *own_keys, const float *own_values, const int64_t *places, const float *sinks,
                      float *out, int64_t n, int64_t heads, int64_t kv_heads, int64_t dim, int64_t value_dim,
                      int64_t longest, int64_t own, float scale, int64_t threads) {
    const long group = heads / kv_heads, stride = up(longest + own, WIDTH);
    float *memory = static_cast<float *>(malloc(sizeof(float) * threads * group * stride));
    if (!memory) return 1;
#pragma omp parallel for num_threads(threads)
    for (long task = 0; task < n * kv_heads; task++) {
        const long response = task / kv_heads, head = task % kv_heads;
        const Place &p = reinterpret_cast<const Place *>(places)[response];
        const long before = (p.context * kv_heads + head) * longest + p.from, at = task * own + p.own_from;
        const Tokens context = {context_keys + before * dim, context_values + before * value_dim, p.to - p.from};
        const Tokens mine = {own_keys + at * dim, own_values + at * value_dim, p.own_to - p.own_from};
        float *scores = memory + omp_get_thread_num() * group * stride, *into = out + task * group * value_dim;
        const float *asked = queries + task * group * dim;
        multiply(asked, group, context, dim, scale, scores, stride);
        multiply(asked, group, mine, dim, scale, scores + context.count, stride);
        for (long g = 0; g < group; g++)
            normalise(scores + g * stride, context.count + mine.count, sinks ? sinks + head * group + g : nullptr);
        product<false>(group, value_dim, context.count, scores, stride, 1, context.values, value_dim, into, value_dim);
        product<true>(group, value_dim, mine.count, scores + context.count, stride, 1, mine.values, value_dim, into,
                      value_dim);
    }
    free(memory);
    return 0;
}
