// Token embedding: rows of the table by token; backward adds each token's gradients to its row, in the order of positions.
//
// Backward sorts the positions by token once, cuts the sorted list into pieces of PIECE and gives a block to each: it adds
// rows in order and writes those of tokens that begin and end in its piece. What crosses a border goes to `edges` (pieces,
// 2, C): slot 0 for the token that began before, slot 1 for the token that goes on; of the blocks that have such a token
// the last one to finish adds its edges, in order. A frequent token (Zipf: one in twelve) is so spread over many blocks,
// and no float is added in an order that depends on timing.
//
// The sort is a stable radix sort of 2 digits, BITS bits each, all in integers. From sm_90 on one cluster of 8 blocks does
// it in shared memory, in one launch; other cards, and more tokens than fit there, take three launches for a digit.
//
// Measured on an H200 with Zipf tokens: forward 90% of a copy; backward 48% for 32768 tokens, C=896 (sort 24 us, sums 33),
// and 69% for 16384, C=3584.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (dtype of activations and weights), G (of the weight's gradient), C, N, BITS, PIECE, KEYS (of a thread of the
// cluster that sorts; 0: none), CLUSTER (8 or 1)

#include "common.cuh"
#include "constants"
#include "cluster.cuh"

constexpr int ACCESSES = C / N, THREADS = 128;

// res (count, C) <- weight (Vp, C), tokens (count,)
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_forward(T* res, const int* tokens, const T* weight, i64 count) {
    i64 first = static_cast<i64>(blockIdx.x) * THREADS * 4 + threadIdx.x;
    Pack<T, N> read[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        i64 at = first + i * THREADS;
        if (at < count * ACCESSES) read[i].load(weight + static_cast<i64>(tokens[at / ACCESSES]) * C + at % ACCESSES * N);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        i64 at = first + i * THREADS;
        if (at < count * ACCESSES) read[i].store(res + at * N);
    }
}

constexpr int BINS = 1 << BITS, SORT_WARPS = 8, PER_WARP = 128, SORT_TILE = SORT_WARPS * PER_WARP;

// counts (BINS, tiles): how often each value of the digit occurs in each tile of SORT_TILE keys. `order` is null in the
// first pass: the identity.
extern "C" __global__ void __launch_bounds__(32 * SORT_WARPS)
    sort_count(int* counts, const int* tokens, const int* order, int shift, int count) {
    __shared__ int bins[BINS];
    for (int b = threadIdx.x; b < BINS; b += 32 * SORT_WARPS) bins[b] = 0;
    __syncthreads();
    int end = min(count, (static_cast<int>(blockIdx.x) + 1) * SORT_TILE);
    for (int i = blockIdx.x * SORT_TILE + threadIdx.x; i < end; i += 32 * SORT_WARPS)
        atomicAdd(&bins[tokens[order ? order[i] : i] >> shift & (BINS - 1)], 1);
    __syncthreads();
    for (int b = threadIdx.x; b < BINS; b += 32 * SORT_WARPS) counts[b * gridDim.x + blockIdx.x] = bins[b];
}

// counts (n,) <- the sum of all before; one block of 1024, 4 counts to a thread; n is a multiple of 4
extern "C" __global__ void __launch_bounds__(1024) sort_scan(int* counts, int n) {
    __shared__ int totals[2][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, before = 0, turn = 0;
    Words<4>* groups = reinterpret_cast<Words<4>*>(counts);
    Words<4> next = {};
    if (4 * threadIdx.x < n) next = groups[threadIdx.x];
    for (int group = threadIdx.x; group - threadIdx.x < n / 4; group += 1024, turn ^= 1) {
        Words<4> own = next;
        next = {};
        if (group + 1024 < n / 4) next = groups[group + 1024];
        int sum = own.at[0] + own.at[1] + own.at[2] + own.at[3], all = sum;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(0xffffffffu, all, step);
            if (lane >= step) all += other;
        }
        if (lane == 31) totals[turn][warp] = all;
        __syncthreads();
        int of_warps = totals[turn][lane], own_warp = of_warps;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(0xffffffffu, of_warps, step);
            if (lane >= step) of_warps += other;
        }
        u32 start = before + all - sum + __shfl_sync(0xffffffffu, of_warps - own_warp, warp);
        before += __shfl_sync(0xffffffffu, of_warps, 31);
        Words<4> starts = {start, start + own.at[0], start + own.at[0] + own.at[1],
                           start + own.at[0] + own.at[1] + own.at[2]};
        if (group < n / 4) groups[group] = starts;
    }
}

// to (count,) <- positions in the order of the digit, equal digits in their old order; `starts` from sort_scan. Where
// `sorted` (count,) is wanted it takes their tokens, and `arrived` (size,) zeros.
extern "C" __global__ void __launch_bounds__(32 * SORT_WARPS)
    sort_place(int* to, int* sorted, u32* arrived, const int* starts, const int* tokens, const int* order, int shift,
               int count, int size) {
    __shared__ u16 seen[SORT_WARPS][BINS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = blockIdx.x * 32 * SORT_WARPS + threadIdx.x; sorted && i < size; i += gridDim.x * 32 * SORT_WARPS)
        arrived[i] = 0;
    for (int i = threadIdx.x; i < SORT_WARPS * BINS; i += 32 * SORT_WARPS) (&seen[0][0])[i] = 0;
    __syncthreads();
    int digits[PER_WARP / 32], ranks[PER_WARP / 32], positions[PER_WARP / 32];
    int first = blockIdx.x * SORT_TILE + warp * PER_WARP + lane;
#pragma unroll
    for (int i = 0; i < PER_WARP / 32; i++) {
        int at = first + i * 32;
        bool real = at < count;
        int position = !real ? 0 : order ? order[at] : at;
        int digit = real ? tokens[position] >> shift & (BINS - 1) : BINS;  // BINS: no key, and a group of its own
        u32 peers = __match_any_sync(0xffffffffu, digit);
        int below = __popc(peers & ((1u << lane) - 1)), before = real ? seen[warp][digit] : 0;
        __syncwarp();
        if (real && below == 0) seen[warp][digit] = static_cast<u16>(before + __popc(peers));
        __syncwarp();
        digits[i] = digit, ranks[i] = before + below, positions[i] = position;
    }
    __syncthreads();
    for (int b = threadIdx.x; b < BINS; b += 32 * SORT_WARPS) {
        int sum = 0;
#pragma unroll
        for (int w = 0; w < SORT_WARPS; w++) {
            int own = seen[w][b];
            seen[w][b] = static_cast<u16>(sum);
            sum += own;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER_WARP / 32; i++) {
        if (first + i * 32 >= count) continue;
        int place = starts[digits[i] * gridDim.x + blockIdx.x] + seen[warp][digits[i]] + ranks[i];
        to[place] = positions[i];
        if (sorted) sorted[place] = tokens[positions[i]];
    }
}

// The whole sort by one cluster. Block r has the keys from r * OWN on, a warp 32 * KEYS in a row, and
// ranks equal digits of a warp by a vote, those of a block by counts of its warps, those of the cluster by counts of its
// blocks. After the first digit keys go to the block that has their place, after the second one to memory. `arrived`
// (size,) is cleared.
constexpr int HELD = KEYS ? KEYS : 1, OWN = 1024 * HELD;
struct Sorting {
    u64 keys[OWN];                 // token and position
    int of_blocks[CLUSTER][BINS];  // how often each digit occurs in each block
    int starts[BINS];              // the first place of this block's keys of each digit
    int totals[32];
    u16 seen[32][BINS];  // how often each digit occurs in each warp, then in all warps before it
};

extern "C" __global__ void CLUSTERED __launch_bounds__(1024)
    sort_cluster(int* order, int* sorted, u32* arrived, const int* tokens, int count, int size) {
#if __CUDA_ARCH__ >= 900
    if constexpr (KEYS > 0) {
        extern __shared__ __align__(16) u8 memory[];
        Sorting& own = *reinterpret_cast<Sorting*>(memory);
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int rank = static_cast<int>(cluster_rank()), first = rank * OWN + warp * 32 * HELD + lane;
        u32 key[HELD], position[HELD];
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            position[i] = first + i * 32;
            key[i] = first + i * 32 < count ? tokens[first + i * 32] : 0;
        }
        cluster_arrive();
        for (int i = blockIdx.x * 1024 + threadIdx.x; i < size; i += CLUSTER * 1024) arrived[i] = 0;
#pragma unroll 1
        for (int pass = 0; pass < 2; pass++) {
            int place[HELD];
            for (int i = threadIdx.x; i < 32 * BINS / 2; i += 1024) reinterpret_cast<u32*>(own.seen)[i] = 0;
            __syncthreads();
#pragma unroll
            for (int i = 0; i < HELD; i++) {
                bool real = first + i * 32 < count;
                u32 digit = real ? key[i] >> (pass ? BITS : 0) & (BINS - 1) : BINS;  // BINS: no key, a group of its own
                u32 peers = __match_any_sync(0xffffffffu, digit);
                int below = __popc(peers & ((1u << lane) - 1)), before = real ? own.seen[warp][digit] : 0;
                __syncwarp();
                if (real && below == 0) own.seen[warp][digit] = static_cast<u16>(before + __popc(peers));
                __syncwarp();
                place[i] = before + below;
            }
            __syncthreads();
            cluster_wait();  // the others have begun, or read what the last digit left here
            for (int b = threadIdx.x; b < BINS; b += 1024) {
                int sum = 0;
#pragma unroll
                for (int w = 0; w < 32; w++) {
                    int of_warp = own.seen[w][b];
                    own.seen[w][b] = static_cast<u16>(sum);
                    sum += of_warp;
                }
#pragma unroll
                for (int r = 0; r < CLUSTER; r++) store_remote(remote(&own.of_blocks[rank][b], r), static_cast<u32>(sum));
            }
            cluster_arrive();
            cluster_wait();
            int begun = 0;
            for (int group = 0; group < BINS; group += 1024) {
                int b = group + threadIdx.x, before = 0, total = 0;
#pragma unroll
                for (int r = 0; r < CLUSTER; r++) {
                    int of_block = b < BINS ? own.of_blocks[r][b] : 0;
                    before += r < rank ? of_block : 0;
                    total += of_block;
                }
                int all = total;
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    int other = __shfl_up_sync(0xffffffffu, all, step);
                    if (lane >= step) all += other;
                }
                if (lane == 31) own.totals[warp] = all;
                __syncthreads();
                int of_warp = own.totals[lane], warps = of_warp;
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    int other = __shfl_up_sync(0xffffffffu, warps, step);
                    if (lane >= step) warps += other;
                }
                int before_warp = __shfl_sync(0xffffffffu, warps - of_warp, warp);
                if (b < BINS) own.starts[b] = begun + before + all - total + before_warp;
                begun += __shfl_sync(0xffffffffu, warps, 31);
                __syncthreads();
            }
#pragma unroll
            for (int i = 0; i < HELD; i++) {
                if (first + i * 32 >= count) continue;
                u32 digit = key[i] >> (pass ? BITS : 0) & (BINS - 1);
                int to = own.starts[digit] + own.seen[warp][digit] + place[i];
                if (pass == 0) {
                    u32 both[2] = {key[i], position[i]};
                    store_remote(remote(&own.keys[to % OWN], to / OWN), both);
                } else {
                    order[to] = static_cast<int>(position[i]);
                    sorted[to] = static_cast<int>(key[i]);
                }
            }
            if (pass) break;
            cluster_arrive();
            cluster_wait();
#pragma unroll
            for (int i = 0; i < HELD; i++) {
                if (first + i * 32 >= count) continue;
                u64 both = own.keys[first + i * 32 - rank * OWN];
                key[i] = static_cast<u32>(both), position[i] = static_cast<u32>(both >> 32);
            }
            cluster_arrive();
        }
    }
#endif
}

// What other blocks have written: not through the first-level cache.
__device__ __forceinline__ void load_fresh(const float* from, Pack<float, N>& to) {
    constexpr int WIDE = N % 4 ? 1 : 4;
#pragma unroll
    for (int i = 0; i < N; i += WIDE) {
        if constexpr (WIDE == 4)
            asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to.at[i]), "=r"(to.at[i + 1]), "=r"(to.at[i + 2]), "=r"(to.at[i + 3])
                         : "l"(from + i));
        else
            asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(to.at[i]) : "l"(from + i));
    }
}

// The token of slot `slot` of this piece crosses a border. The last block to come here for it adds its edges, in order, to
// the row; all threads call it, after the edge is written.
template <bool ADD_OLD>
__device__ __forceinline__ void join(G* d_weight, float* edges, u32* arrived, const int* sorted, int count, int slot,
                                     int token, int column) {
    __shared__ int is_last;
    __threadfence();
    __syncthreads();
    // pieces side by side that begin with the token while it began before: counted downwards and upwards from this one
    int piece = blockIdx.y, pieces = (count + PIECE - 1) / PIECE, down = slot ? 0 : 1, up = 0, found;
    if (slot == 0) {
        do {
            int at = piece - down - static_cast<int>(threadIdx.x);  // does the token begin before this piece?
            found = __syncthreads_count(at > 0 && sorted[at * PIECE - 1] == token);
            down += found;
        } while (found == THREADS);
    }
    do {
        int at = piece + up + 1 + static_cast<int>(threadIdx.x);
        found = __syncthreads_count(at < pieces && sorted[at * PIECE] == token);
        up += found;
    } while (found == THREADS);
    int first = piece - down, last = piece + up;
    if (threadIdx.x == 0)
        is_last = atomicAdd(&arrived[first * gridDim.x + blockIdx.x], 1) == static_cast<u32>(last - first);
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (column >= C) return;
    constexpr int AT_ONCE = 8;
    G* to = d_weight + static_cast<i64>(token) * C + column;
    float old[N] = {}, sum[N] = {};
    if constexpr (ADD_OLD) load(to, old);
    for (int group = first; group <= last; group += AT_ONCE) {
        Pack<float, N> more[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (group + i <= last) load_fresh(edges + (static_cast<i64>(group + i) * 2 + (group + i == first)) * C + column, more[i]);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (group + i > last) break;
            float v[N];
            more[i].get(v);
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] += v[j];
        }
    }
#pragma unroll
    for (int j = 0; j < N; j++) sum[j] = old[j] + sum[j];
    store(to, sum);
}

// blockIdx: (columns, piece)
template <bool ADD_OLD>
__device__ __forceinline__ void add_piece(G* d_weight, float* edges, u32* arrived, const T* d_res, const int* order,
                                          const int* sorted, int count) {
    __shared__ int positions[PIECE], keys[PIECE + 2];  // keys with a neighbour on each side, -1 where there is none
    int start = blockIdx.y * PIECE, size = min(PIECE, count - start);
    for (int i = threadIdx.x; i < size + 2; i += THREADS) {
        int at = start + i - 1;
        keys[i] = at >= 0 && at < count ? sorted[at] : -1;
        if (i >= 1 && i <= size) positions[i - 1] = order[at];
    }
    __syncthreads();
    int column = (blockIdx.x * THREADS + threadIdx.x) * N;
    bool began_before = keys[0] == keys[1], goes_on = keys[size] == keys[size + 1];
    if (column < C) {
        constexpr int AT_ONCE = 8;
        float sum[N] = {};
        bool before = began_before;
        for (int group = 0; group < size; group += AT_ONCE) {
            Pack<T, N> read[AT_ONCE];
            Pack<G, N> old[ADD_OLD ? AT_ONCE : 1];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (group + i >= size) break;
                read[i].load(d_res + static_cast<i64>(positions[group + i]) * C + column);
                int token = keys[group + i + 1];
                if (ADD_OLD && token != keys[group + i + 2]) old[i].load(d_weight + static_cast<i64>(token) * C + column);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (group + i >= size) break;
                int token = keys[group + i + 1];
                bool more = token == keys[group + i + 2], last = group + i + 1 == size;
                float v[N];
                read[i].get(v);
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] += v[j];
                if (more && !last) continue;
                if (before || more) {
                    store(edges + (static_cast<i64>(blockIdx.y) * 2 + (before ? 0 : 1)) * C + column, sum);
                } else {
                    if constexpr (ADD_OLD) {
                        old[i].get(v);
#pragma unroll
                        for (int j = 0; j < N; j++) sum[j] = v[j] + sum[j];
                    }
                    store(d_weight + static_cast<i64>(token) * C + column, sum);
                }
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] = 0;
                before = false;
            }
        }
    }
    // a token that both began before and goes on has one edge here, in slot 0
    if (began_before) join<ADD_OLD>(d_weight, edges, arrived, sorted, count, 0, keys[1], column);
    if (goes_on && !(began_before && keys[1] == keys[size]))
        join<ADD_OLD>(d_weight, edges, arrived, sorted, count, 1, keys[size], column);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_write(G* d_weight, float* edges, u32* arrived, const T* d_res, const int* order, const int* sorted, int count) {
    add_piece<false>(d_weight, edges, arrived, d_res, order, sorted, count);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_add(G* d_weight, float* edges, u32* arrived, const T* d_res, const int* order, const int* sorted, int count) {
    add_piece<true>(d_weight, edges, arrived, d_res, order, sorted, count);
}
