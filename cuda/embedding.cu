// Token embedding: rows of the table by token; backward adds each token's gradients to its row, in the order of positions.
//
// Backward lists the positions of each token next to each other once, cuts the list into pieces of PIECE and gives a piece
// to warps, each of which adds 32 accesses of its rows, in order, and writes those of tokens that begin and end in it. What
// crosses a border goes to `edges` (pieces, 2, C): slot 0 for the token that began before, slot 1 for the token that goes
// on; of the warps that have such a token the last one to finish adds its edges, in order. A frequent token (Zipf: one in
// eleven) is so spread over many warps, and no float is added in an order that depends on timing.
//
// The list is grouped by token, not sorted: token -> token * FACTOR mod 2^BITS is one to one and spreads frequent tokens
// over the blocks, which own them by the upper bits. Every block reads all tokens and counts those of blocks before it, so
// that it knows where its own begin without waiting for anyone.
//
// Measured on an H200 with Zipf tokens: forward 90% of a copy; backward 60% for 32768 tokens, C=896 (grouping 11 us of 48),
// and 72% for 16384, C=3584 (9 of 79). Reading rows ahead into L2 while the list is made costs more than it saves.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (dtype of activations and weights), G (of the weight's gradient), C, N; for backward BITS (of a token),
// BUCKET_BITS (of those, the upper ones that say which block), HELD (positions that a block lists in shared memory), VOTES
// (words of votes that it keeps there; 0: it asks again), GROUPING_BYTES (of shared memory for all of this), MOST_TOKENS
// (of a call), PIECE, WARPS (of a block that adds), STAGES (rows that a warp has under way)

#include "common.cuh"
#include "constants"

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

constexpr u32 ALL = 0xffffffffu;
__device__ constexpr u32 inverse(u32 odd) {  // mod 2^32: each step doubles the bits that are right
    u32 x = odd;
    for (int i = 0; i < 4; i++) x *= 2u - odd * x;
    return x;
}
constexpr u32 FACTOR = 0x9e3779b1u >> (32 - BITS) | 1;  // by the golden ratio: neighbours come far apart
constexpr u32 BUCKETS = 1u << BUCKET_BITS;
constexpr int BIN_BITS = BITS - BUCKET_BITS, BINS = 1 << BIN_BITS, RANKERS = 8;
constexpr int MORE = -1, EDGE = -2;

// One position of the list, and where the sum goes after it: to row `to`, nowhere yet (MORE), to edge slot EDGE - to.
struct __align__(8) Row {
    int position, to;
};
// The token that crosses a border of a piece: the pieces it is in, and whether there is one. Slots as those of edges.
struct __align__(16) Border {
    int first, last, token, real;
};

// the bits of token * FACTOR mod 2^BITS, at the top of the word
__device__ __forceinline__ u32 spread(int token) { return static_cast<u32>(token) * (FACTOR << (32 - BITS)); }

// the sum over this lane and those before
__device__ __forceinline__ int sum_through(int x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(ALL, x, step);
        if (threadIdx.x % 32 >= step) x += other;
    }
    return x;
}

// In lane i which of the 32 tokens from `first` + 32 i on are in the bucket; `smaller` counts those of buckets before it.
__device__ __forceinline__ u32 vote(const int* tokens, int first, int end, u32 bucket, int& smaller) {
    int lane = threadIdx.x % 32;
    u32 buckets[32], word = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int at = first + i * 32 + lane;
        buckets[i] = at < end ? spread(tokens[at]) >> (32 - BUCKET_BITS) : BUCKETS;
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        u32 yes = __ballot_sync(ALL, buckets[i] == bucket);
        if (lane == i) word = yes;
        smaller += buckets[i] < bucket;
    }
    return word;
}

struct Grouping {
    int seen[RANKERS][BINS];  // how often each bin occurs in each ranking warp's share, then in all shares before it
    int starts[BINS + 4];     // where each bin begins in this block's list
    int own[32], smaller[32], totals[32];
    u32 votes[VOTES ? VOTES : 1];
    int positions[HELD];
    u32 codes[HELD];  // bin and, above it, rank in the share of a ranking warp
};
static_assert(sizeof(Grouping) == GROUPING_BYTES, "the launcher asks for other than the size of Grouping");
static_assert(MOST_TOKENS <= i64{RANKERS} << (32 - BIN_BITS), "a rank does not fit beside its bin");

// rows (count,) <- positions grouped by token, those of a token in order; borders (pieces, 2); `arrived` (cells,) zeros.
// A block of 1024 owns a bucket; each warp reads tokens that lie side by side. `listed` (2, count) is for buckets that
// shared memory does not hold.
extern "C" __global__ void __launch_bounds__(1024)
    embedding_group(Row* rows, Border* borders, u32* arrived, int* listed, const int* tokens, int count, int cells) {
    extern __shared__ __align__(16) u8 memory[];
    Grouping& shared = *reinterpret_cast<Grouping*>(memory);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 bucket = blockIdx.x;
    int span = (count + 1023) / 1024 * 32, first = warp * span, end = min(count, first + span), own = 0, smaller = 0, unused;
    for (int at = first, i = threadIdx.x; at < end; at += 1024, i += 1024) {
        u32 word = vote(tokens, at, end, bucket, smaller);
        if constexpr (VOTES > 0) shared.votes[i] = word;
        own += __popc(word);
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < RANKERS * BINS; i += 1024) (&shared.seen[0][0])[i] = 0;
#pragma unroll 1
    for (int i = blockIdx.x * 1024 + threadIdx.x; i < cells; i += gridDim.x * 1024) arrived[i] = 0;
    int through = sum_through(own), smaller_through = sum_through(smaller);
    if (lane == 31) shared.own[warp] = through, shared.smaller[warp] = smaller_through;
    __syncthreads();

    int of_warp = shared.own[lane], warps = sum_through(of_warp);
    int size = __shfl_sync(ALL, warps, 31), place = __shfl_sync(ALL, warps - of_warp, warp);
    int base = __shfl_sync(ALL, sum_through(shared.smaller[lane]), 31);
    if (size == 0) return;
    int* positions = size <= HELD ? shared.positions : listed + base;
    u32* codes = size <= HELD ? shared.codes : reinterpret_cast<u32*>(listed + count) + base;
    if (threadIdx.x == 0) shared.starts[BINS] = size;
    for (int at = first, i = threadIdx.x; at < end; at += 1024, i += 1024) {
        u32 word = VOTES > 0 ? shared.votes[i] : vote(tokens, at, end, bucket, unused);
        int before = sum_through(__popc(word)), to = place + before - __popc(word);
        for (; word; word &= word - 1) positions[to++] = at + lane * 32 + __ffs(word) - 1;
        place += __shfl_sync(ALL, before, 31);
    }
    __syncthreads();
#pragma unroll 1
    for (int group = threadIdx.x; group < size; group += 4096) {
        int token[4];
#pragma unroll
        for (int j = 0; j < 4; j++) token[j] = group + j * 1024 < size ? tokens[positions[group + j * 1024]] : 0;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (group + j * 1024 < size) codes[group + j * 1024] = spread(token[j]) << BUCKET_BITS >> (32 - BIN_BITS);
    }
    __syncthreads();

    int share = (size + 32 * RANKERS - 1) / (32 * RANKERS) * 32;
    if (warp < RANKERS) {
#pragma unroll 2
        for (int start = warp * share; start < min(size, (warp + 1) * share); start += 32) {
            int i = start + lane;
            u32 bin = i < size ? codes[i] : BINS;  // BINS: no position, and a group of its own
            u32 peers = __match_any_sync(ALL, bin);
            int below = __popc(peers & ((1u << lane) - 1)), before = i < size ? shared.seen[warp][bin] : 0;
            __syncwarp();
            if (i < size && below == 0) shared.seen[warp][bin] = before + __popc(peers);
            __syncwarp();
            if (i < size) codes[i] = bin | static_cast<u32>(before + below) << BIN_BITS;
        }
    }
    __syncthreads();

    constexpr int PER = BINS > 1024 ? BINS / 1024 : 1;
    int of_bin[PER], sum = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) {
        int bin = threadIdx.x * PER + j, all = 0;
#pragma unroll
        for (int r = 0; r < RANKERS && bin < BINS; r++) {
            int of_share = shared.seen[r][bin];
            shared.seen[r][bin] = all;
            all += of_share;
        }
        of_bin[j] = sum, sum += all;
    }
    through = sum_through(sum);
    if (lane == 31) shared.totals[warp] = through;
    __syncthreads();
    of_warp = shared.totals[lane], warps = sum_through(of_warp);
    int before_own = __shfl_sync(ALL, warps - of_warp, warp) + through - sum;
#pragma unroll
    for (int j = 0; j < PER; j++)
        if (threadIdx.x * PER + j < BINS) shared.starts[threadIdx.x * PER + j] = before_own + of_bin[j];
    __syncthreads();

#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += 1024) {
        int bin = codes[i] & (BINS - 1), position = positions[i];
        int start = base + shared.starts[bin], stop = base + shared.starts[bin + 1];
        int to = start + shared.seen[i / share][bin] + static_cast<int>(codes[i] >> BIN_BITS);
        int token = ((bucket << BIN_BITS | bin) * inverse(FACTOR)) & ((1u << BITS) - 1), piece = to / PIECE;
        bool more = to + 1 < stop, ends = to % PIECE == PIECE - 1 || to == count - 1, before = start < piece * PIECE;
        rows[to] = {position, more && !ends ? MORE : before ? EDGE : more ? EDGE - 1 : token};
        Border border = {start / PIECE, (stop - 1) / PIECE, token, 1}, none = {};
        if (to % PIECE == 0) borders[2 * piece] = before ? border : none;
        if (ends) borders[2 * piece + 1] = more && !before ? border : none;
    }
}

constexpr int CHUNK = 32 * N, CHUNKS = (C + CHUNK - 1) / CHUNK;

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

// The token of a border. The last warp to come here for it adds its edges, in order, to the row; all lanes call it, after
// the edge is written.
template <bool ADD_OLD>
__device__ __forceinline__ void join(G* d_weight, const float* edges, u32* arrived, Border border, int chunk, int column) {
    u32 before = 0;
    if (threadIdx.x % 32 == 0) before = atomicAdd(&arrived[border.first * CHUNKS + chunk], 1);
    if (__shfl_sync(ALL, before, 0) != static_cast<u32>(border.last - border.first)) return;
    __threadfence();
    if (column >= C) return;
    constexpr int AT_ONCE = 4;
    G* to = d_weight + static_cast<i64>(border.token) * C + column;
    float old[N] = {}, sum[N] = {};
    if constexpr (ADD_OLD) load(to, old);
    for (int group = border.first; group <= border.last; group += AT_ONCE) {
        Pack<float, N> more[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int piece = group + i;
            if (piece <= border.last)
                load_fresh(edges + (static_cast<i64>(piece) * 2 + (piece == border.first)) * C + column, more[i]);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (group + i > border.last) break;
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

// N numbers to shared memory, in the background
template <typename X>
__device__ __forceinline__ void copy_async(X* to, const X* from) {
    constexpr int BYTES = N * sizeof(X);
    u32 shared = static_cast<u32>(__cvta_generic_to_shared(to));
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(__cvta_generic_to_global(from)), "n"(BYTES)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(__cvta_generic_to_global(from)), "n"(BYTES)
                     : "memory");
}

// A warp takes 32 accesses of a piece. Each lane keeps STAGES rows of its own columns under way in shared memory, which no
// other lane reads: nothing is waited for but the row itself.
template <bool ADD_OLD>
__device__ __forceinline__ void add_piece(G* d_weight, float* edges, u32* arrived, const T* d_res, const Row* rows,
                                          const Border* borders, int count) {
    __shared__ __align__(16) T read[WARPS][STAGES][32][N];
    __shared__ __align__(16) G old[WARPS][ADD_OLD ? STAGES : 1][32][N];
    __shared__ Row list[WARPS][PIECE];
    __shared__ Border crossing[WARPS][2];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 unit = static_cast<i64>(blockIdx.x) * WARPS + warp;
    int piece = static_cast<int>(unit / CHUNKS), chunk = static_cast<int>(unit % CHUNKS), column = (chunk * 32 + lane) * N;
    int start = piece * PIECE, size = min(PIECE, count - start);
    if (size <= 0) return;
    for (int i = lane; i < size; i += 32) list[warp][i] = rows[start + i];
    if (lane < 2) crossing[warp][lane] = borders[2 * piece + lane];
    __syncwarp();
    if (column < C) {
        auto fetch = [&](int i) {
            if (i < size) {
                Row row = list[warp][i];
                copy_async(read[warp][i % STAGES][lane], d_res + static_cast<i64>(row.position) * C + column);
                if (ADD_OLD && row.to >= 0)
                    copy_async(old[warp][i % STAGES][lane], d_weight + static_cast<i64>(row.to) * C + column);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) fetch(i);
        float sum[N] = {};
#pragma unroll 1
        for (int i = 0; i < size; i++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
            float v[N];
            load(read[warp][i % STAGES][lane], v);
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] += v[j];
            int to = list[warp][i].to;
            if (to != MORE) {
                if (to < 0) {
                    store(edges + (static_cast<i64>(piece) * 2 + (EDGE - to)) * C + column, sum);
                } else {
                    if constexpr (ADD_OLD) {
                        load(old[warp][i % STAGES][lane], v);
#pragma unroll
                        for (int j = 0; j < N; j++) sum[j] = v[j] + sum[j];
                    }
                    store(d_weight + static_cast<i64>(to) * C + column, sum);
                }
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] = 0;
            }
            fetch(i + STAGES);
        }
    }
    if (!crossing[warp][0].real && !crossing[warp][1].real) return;
    __threadfence();
    __syncwarp();
#pragma unroll 1
    for (int slot = 0; slot < 2; slot++)
        if (crossing[warp][slot].real) join<ADD_OLD>(d_weight, edges, arrived, crossing[warp][slot], chunk, column);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 32 / WARPS)
    embedding_write(G* d_weight, float* edges, u32* arrived, const T* d_res, const Row* rows, const Border* borders,
                    int count) {
    add_piece<false>(d_weight, edges, arrived, d_res, rows, borders, count);
}
extern "C" __global__ void __launch_bounds__(32 * WARPS, 32 / WARPS)
    embedding_add(G* d_weight, float* edges, u32* arrived, const T* d_res, const Row* rows, const Border* borders, int count) {
    add_piece<true>(d_weight, edges, arrived, d_res, rows, borders, count);
}
