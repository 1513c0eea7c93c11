// What all emulated kernels share: threads that run in turn, and blocks. Their libraries are linked to it.

#include <thread>

namespace emulation {

__thread Block* block = nullptr;

void fail(const char* what) {
    block->cluster->failure = what;
    _longjmp(block->scheduler, 1);
}

void hand_on() {
    Fiber& own = block->fiber();
    if (!_setjmp(own.at)) _longjmp(block->scheduler, 1);
}

void wait(Barrier& barrier, int needed) {
    unsigned generation = barrier.generation;
    if (++barrier.arrived >= needed) return barrier.open();
    while (barrier.generation == generation) hand_on();
}

static void enter() {
    block->kernel(block->arguments);
    Fiber& own = block->fiber();
    if (!own.copies.empty()) fail("a copy in the background that is never waited for");
    Warp& warp = block->warp();
    own.done = true;
    block->live--, warp.live--;
    // who is gone counts as arrived everywhere
    if (block->all.arrived && block->all.arrived >= block->live) block->all.open();
    if (warp.barrier.arrived && warp.barrier.arrived >= warp.live) warp.barrier.open();
    block->cluster->live--;
    block->cluster->check();
    _longjmp(block->scheduler, 1);
}

static void run_block(Block& own) {
    block = &own;
    unsigned threads = own.size.x;
    static thread_local std::vector<Fiber> kept;
    if (kept.size() < threads) kept.resize(threads);
    own.fibers.swap(kept);
    own.warps.assign((threads + 31) / 32, Warp());
    own.live = static_cast<int>(threads);
    for (unsigned t = 0; t < threads; t++) {
        Fiber& fiber = own.fibers[t];
        fiber.thread = {t, 0, 0}, fiber.number = t, fiber.done = fiber.begun = false, fiber.rounds = fiber.group = 0;
        fiber.copies.clear();
        if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
        own.warps[t / 32].live++;
    }
    for (unsigned left = threads; left && !own.cluster->failure;) {
        unsigned live_before = left;
        for (unsigned t = 0; t < threads; t++) {
            if (own.fibers[t].done) continue;
            own.running = t;
            Fiber& fiber = own.fibers[t];
            if (!_setjmp(own.scheduler)) {
                if (fiber.begun) _longjmp(fiber.at, 1);
                fiber.begun = true;
                getcontext(&fiber.start);
                fiber.start.uc_stack.ss_sp = fiber.stack.get();
                fiber.start.uc_stack.ss_size = STACK_BYTES;
                fiber.start.uc_link = nullptr;
                makecontext(&fiber.start, enter, 0);
                setcontext(&fiber.start);
            }
            if (own.cluster->failure) break;
            if (own.fibers[own.running].done) left--;
        }
        if (own.cluster->size > 1 && left == live_before) std::this_thread::yield();
    }
    own.fibers.swap(kept);
    block = nullptr;
}

const char* launch(const unsigned* grid, unsigned threads, size_t shared, unsigned size, void (*kernel)(void**),
                   void** arguments, char* (*marker)()) {
    unsigned blocks = grid[0] * grid[1] * grid[2];
    if (grid[0] % size) return "the grid is no multiple of the cluster";
    for (unsigned first = 0; first < blocks; first += size) {
        Cluster cluster(size, shared);
        cluster.live = static_cast<int>(size * threads);
        auto run = [&](unsigned rank) {
            unsigned number = first + rank;
            Block own;
            own.grid = {grid[0], grid[1], grid[2]}, own.size = {threads, 1, 1};
            own.block = {number % grid[0], number / grid[0] % grid[1], number / grid[0] / grid[1]};
            own.rank = rank, own.cluster = &cluster, own.kernel = kernel, own.arguments = arguments;
            cluster.statics[rank] = marker();
            cluster.begun++;
            while (cluster.begun < size) std::this_thread::yield();
            run_block(own);
        };
        if (size == 1) {
            run(0);
        } else {
            std::vector<std::thread> all;
            for (unsigned rank = 0; rank < size; rank++) all.emplace_back(run, rank);
            for (auto& one : all) one.join();
        }
        if (cluster.failure) return cluster.failure;
    }
    return nullptr;
}

}  // namespace emulation
