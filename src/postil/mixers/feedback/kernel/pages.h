// Large tables, on large pages, kept between calls.
//
// A page of memory that is used for the first time has to be cleared by the system, which takes as long as
// the arithmetic on it, and training would pay for it in every update. And a processor remembers where only
// so many pages are: with pages of 2 MiB it remembers all of them.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

constexpr size_t HUGE_PAGE = size_t(1) << 21;

static void* fresh_pages(size_t bytes) {
#if defined(__linux__)
    void* found = mmap(nullptr, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    // A large page must begin at a multiple of its size; what lies before and behind is given back.
    auto from = (uintptr_t)found, at = (from + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    if (at > from) munmap(found, at - from);
    if (size_t rest = from + HUGE_PAGE - at) munmap((void*)(at + bytes), rest);
    madvise((void*)at, bytes, MADV_HUGEPAGE);
    return (void*)at;
#else
    void* found = std::aligned_alloc(64, bytes);
    if (!found) throw std::bad_alloc();
    return found;
#endif
}

static void return_pages(void* at, size_t bytes) {
#if defined(__linux__)
    munmap(at, bytes);
#else
    std::free(at);
#endif
}

// Whoever takes a table owns it until he gives it back: two forward passes before a backward pass never meet.
// What is kept idle is at most what was lately in use; a round ends whenever everything has been given back.
class Pages {
    struct Idle {
        void* at;
        size_t bytes;
    };
    std::mutex lock;
    std::list<Idle> idle;
    std::map<void*, size_t> taken;
    size_t resting = 0, in_use = 0, most = 0, most_before = 0;

   public:
    float* take(int64_t floats) {
        size_t bytes = (size_t(floats) * 4 + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        std::lock_guard<std::mutex> guard(lock);
        auto best = idle.end();
        for (auto i = idle.begin(); i != idle.end(); ++i)
            if (i->bytes >= bytes && i->bytes <= 2 * bytes && (best == idle.end() || i->bytes < best->bytes))
                best = i;
        void* at;
        if (best == idle.end()) {
            at = fresh_pages(bytes);
        } else {
            at = best->at;
            bytes = best->bytes;
            resting -= bytes;
            idle.erase(best);
        }
        taken[at] = bytes;
        in_use += bytes;
        most = most > in_use ? most : in_use;
        return (float*)at;
    }

    void give(void* at) {
        std::lock_guard<std::mutex> guard(lock);
        size_t bytes = taken.at(at);
        taken.erase(at);
        in_use -= bytes;
        idle.push_back({at, bytes});
        resting += bytes;
        size_t lately = most > most_before ? most : most_before;
        for (; resting > lately; idle.pop_front()) {
            return_pages(idle.front().at, idle.front().bytes);
            resting -= idle.front().bytes;
        }
        if (in_use == 0) {
            most_before = most;
            most = 0;
        }
    }
};

// Never destroyed: tensors that outlive the program's end still give their tables back.
static Pages& pages() {
    static Pages* all = new Pages;
    return *all;
}

// Room for one call's, or one thread's, own tables; given back together.
struct Arena {
    std::vector<float*> blocks;
    float* at = nullptr;
    int64_t left = 0;

    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {
        for (float* block : blocks) pages().give(block);
    }

    // Whole cache lines, an odd number of them: tables of equal size then do not compete for the same places
    // in the cache.
    float* take(int64_t floats) {
        floats = 16 * ((floats + 15) / 16 | 1);
        if (floats > left) {
            left = floats > (1 << 20) ? floats : 1 << 20;
            at = pages().take(left);
            blocks.push_back(at);
        }
        float* taken = at;
        at += floats;
        left -= floats;
        return taken;
    }
    float* zeros(int64_t floats) {
        float* taken = take(floats);
        for (int64_t i = 0; i < floats; ++i) taken[i] = 0;
        return taken;
    }
};
