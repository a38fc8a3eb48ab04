// What orders what on the emulated device: streams as vector clocks, who has touched which memory, and results that are on their way.
//
// A clock says for each stream how many of its operations are known to have ended. An operation advances the clock of its stream; waiting
// joins the clock of who waits with that of whom it waits for. Two accesses to the same bytes, one of them a write, are ordered if the
// later one's clock knows the earlier one. Otherwise they race, whatever happened to come first on this machine.
//
// Nothing here knows torch or Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emulated {

using Stream = int64_t;
using Pool = int64_t;  // the memory of some graphs; 0: no graph's
using Tick = int64_t;  // the number of an operation on its stream, from 1

constexpr unsigned char UNINITIALIZED = 0xFE;
constexpr unsigned char ON_ITS_WAY = 0xFF;  // NaN in every floating dtype
constexpr int64_t LONG_AGO = 40;            // so many operations later the device has come by
constexpr size_t SHELF = 64;                // so many collectives later each one's end has been seen

class Clock {
 public:
  Tick of(Stream stream) const {
    auto found = ticks_.find(stream);
    return found == ticks_.end() ? 0 : found->second;
  }
  bool knows(Stream stream, Tick tick) const { return of(stream) >= tick; }
  void join(const Clock& other) {
    for (auto& [stream, tick] : other.ticks_) raise(stream, tick);
  }
  Tick advance(Stream stream) { return ++ticks_[stream]; }
  void raise(Stream stream, Tick tick) { ticks_[stream] = std::max(ticks_[stream], tick); }

 private:
  std::map<Stream, Tick> ticks_;
};

struct Event {
  Stream stream = 0;
  Clock clock;
  int64_t operations = 0;  // launched on the device before it
};

struct Region {
  char *begin, *end;
  bool overlaps(const Region& other) const { return begin < other.end && other.begin < end; }
  bool contains(const Region& other) const { return begin <= other.begin && other.end <= end; }
};

struct Touch {
  Region region;
  bool write;
};

// Memory on which a result becomes visible.
struct Result {
  char* place;
  std::string bytes;
  Region region() const { return {place, place + bytes.size()}; }
};

class Device {
 public:
  using Report = std::function<void(const std::string&)>;
  using Kept = std::vector<std::shared_ptr<void>>;
  // Of a wait: why, and how many operations have been launched since what is waited for.
  using WaitReport = std::function<void(const std::string&, int64_t)>;

  // Who is told of mistakes, of each time that the host waits, and of each operation of these names. Called without the lock, so all may use the
  // device.
  void watch(Report problem, WaitReport wait, Report launch, std::set<std::string> names) {
    Locked lock(*this);
    on_problem_ = std::move(problem);
    on_wait_ = std::move(wait);
    on_launch_ = std::move(launch);
    looked_for_ = std::move(names);
  }

  void problem(std::string what) { Locked(*this).problem(std::move(what)); }

  // From now on what is launched goes into a graph, or does no longer: the host must not wait, nor ask for times.
  void capture(bool on) {
    Locked lock(*this);
    captures_ = on;
  }

  // `counted`: in what `memory` says.
  char* allocate(size_t bytes, Stream stream, bool counted = true) {
    Locked lock(*this);
    char* memory = new_memory(bytes, UNINITIALIZED);
    blocks_[memory] = Block{bytes, stream, ++serial_, {}, {}, counted};
    count(counted ? bytes : 0);
    return memory;
  }

  // Memory of graphs, which stays theirs: what is released serves what is captured later. Zeros: a graph is captured without being run, and kernels
  // that look at positions must find some.
  char* allocate_in(Pool pool, size_t bytes, Stream stream) {
    Locked lock(*this);
    OfGraphs& own = pools_[pool];
    own.used += bytes;
    count(std::max<int64_t>(own.used - own.peak, 0));
    own.peak = std::max(own.peak, own.used);
    auto found = own.idle.lower_bound(bytes);
    if (found != own.idle.end()) {
      char* memory = found->second;
      own.idle.erase(found);
      blocks_[memory].bytes = bytes;
      std::memset(memory, 0, bytes);
      return memory;
    }
    char* memory = new_memory(bytes, 0);
    blocks_[memory] = Block{bytes, stream, ++serial_, {}, {}, false, pool, bytes};
    return memory;
  }
  // Nobody replays its graphs any more.
  void drop(Pool pool) {
    Locked lock(*this);
    for (auto& [room, memory] : pools_[pool].idle) give_back(memory);
    count(-pools_[pool].peak);
    pools_.erase(pool);
    for (auto& [memory, block] : blocks_)
      if (block.pool == pool) block.pool = 0;
  }
  // The most that was in use at a time, as if parts of any size could be cut from what was released.
  int64_t bytes_of(Pool pool) {
    Locked lock(*this);
    return pools_[pool].peak;
  }
  // The number of the block in which this lies; 0: in none.
  int64_t block_number(char* memory) {
    Locked lock(*this);
    Block* block = block_of(memory);
    return block ? block->number : 0;
  }

  // The memory may be given to whatever its stream allocates next: what other streams do with it has to be known to who uses that, or to the
  // host, or have been announced (`Tensor.record_stream`).
  void release(char* memory) {
    Locked lock(*this);
    auto found = blocks_.find(memory);
    if (found != blocks_.end() && found->second.pool) {
      OfGraphs& own = pools_[found->second.pool];
      own.used -= found->second.bytes;
      own.idle.emplace(found->second.room, memory);
      return;
    }
    if (found != blocks_.end()) {
      Block& block = found->second;
      auto over = [&](const Access& access) {
        return access.stream == block.stream || block.recorded.count(access.stream) || ended(access, block.stream);
      };
      auto& accesses = block.accesses;
      accesses.erase(std::remove_if(accesses.begin(), accesses.end(), over), accesses.end());
      if (!accesses.empty()) freed_.push_back({block.stream, ++serial_, std::move(accesses)});
    }
    give_back(memory);
  }

  void record_stream(char* memory, Stream stream) {
    Locked lock(*this);
    if (Block* block = block_of(memory)) block->recorded.insert(stream);
  }

  // An operation on a stream that reads and writes these regions.
  void operation(const std::string& name, Stream stream, const std::vector<Touch>& touches) {
    Locked lock(*this);
    Tick tick = advance(stream);
    for (bool write : {false, true})
      for (auto& touch : touches)
        if (touch.write == write && touch.region.begin < touch.region.end)
          access(lock, {touch.region, stream, tick, write, name});
    ++operations_[name];
    ++launched_;
    if (looked_for_.count(name)) lock.launched(name);
  }

  // The last operation of the stream has these results, which nobody sees before a stream has waited. So long `kept` stays alive; and where
  // only callbacks wait, until the collective is seen to have ended.
  void send(const std::string& name, Stream stream, std::vector<Result> results, Kept kept) {
    Locked lock(*this);
    for (auto& result : results) std::memset(result.place, ON_ITS_WAY, result.bytes.size());
    messages_.push_back({stream, clocks_[stream].of(stream), name, std::move(results), std::move(kept)});
  }

  // The last operation of the stream copies between the device and pinned memory. The host sees what came, and may write where the device
  // reads, once it has waited for that. So long `kept` stays alive.
  // `version` counts how often the host has written there.
  void copy(const std::string& name, Stream stream, Result pinned, bool to_host, std::function<int64_t()> version, Kept kept) {
    Locked lock(*this);
    if (to_host) std::memset(pinned.place, ON_ITS_WAY, pinned.bytes.size());
    const int64_t now = version();
    copies_.push_back(
        {{stream, clocks_[stream].of(stream), name, {std::move(pinned)}, std::move(kept)}, to_host, now, std::move(version)});
  }

  // The stream is about to copy from or to this pinned memory: it sees what copies have left there that it comes after.
  void before_copy(Stream stream, const char* place) {
    Locked lock(*this);
    end_copies(lock, clocks_[stream], place);
  }

  size_t messages_on_their_way() {
    Locked lock(*this);
    return messages_.size();
  }

  Event record(Stream stream, bool with_time = false) {
    Locked lock(*this);
    if (with_time && captures_) lock.problem("an event with a time is recorded in a capture");
    return {stream, clocks_[stream], launched_};
  }
  // Whether the device has come by, as far as the host can tell. If so, the host knows it from now on.
  bool happened(const Event& event) {
    Locked lock(*this);
    if (!host_.knows(event.stream, event.clock.of(event.stream))) {
      if (launched_ - event.operations < LONG_AGO) return false;
      host_.join(event.clock);
      end_copies(lock);
    }
    return true;
  }
  void wait(Stream stream, const Event& event, bool for_a_callback = false) {
    Locked lock(*this);
    clocks_[stream].join(event.clock);
    deliver(lock, clocks_[stream], for_a_callback);
  }
  void host_waits_for(const Event& event, const std::string& why) {
    Locked lock(*this);
    host_.join(event.clock);
    end_copies(lock);
    deliver(lock, host_);
    host_has_waited(lock, why, launched_ - event.operations);
  }
  void host_waits(Stream stream, const std::string& why) { host_waits_for(record(stream), why); }
  void host_waits_for_all(const std::string& why) {
    Locked lock(*this);
    for (auto& [stream, clock] : clocks_) host_.join(clock);
    end_copies(lock);
    deliver(lock, host_);
    host_has_waited(lock, why, 0);
  }

  // Operations by name since the last call.
  std::map<std::string, int64_t> operations() {
    Locked lock(*this);
    return std::exchange(operations_, {});
  }
  // The most bytes in use since the last call, and those in use now.
  std::pair<int64_t, int64_t> memory() {
    Locked lock(*this);
    return {std::exchange(peak_, used_), used_};
  }

 private:
  struct Access {
    Region region;
    Stream stream;
    Tick tick;
    bool write;
    std::string operation;
  };
  struct Block {
    size_t bytes;
    Stream stream;
    int64_t number;
    std::set<Stream> recorded;
    std::vector<Access> accesses;
    bool counted = true;
    Pool pool = 0;
    size_t room = 0;
  };
  struct OfGraphs {
    std::multimap<size_t, char*> idle;
    int64_t used = 0, peak = 0;
  };
  // Memory that went back to the allocator of its stream, and what other streams may still do with it.
  struct Freed {
    Stream stream;
    int64_t number;
    std::vector<Access> accesses;
  };
  struct Message {
    Stream stream;
    Tick tick;
    std::string operation;
    std::vector<Result> results;
    Kept kept;
  };
  struct Copy : Message {
    bool to_host;
    int64_t before;
    std::function<int64_t()> version;
  };

  // The lock. What was found meanwhile is reported, and what was kept is let go, after it has been given back: both may come here again.
  class Locked {
   public:
    explicit Locked(Device& device) : device_(device) { device_.mutex_.lock(); }
    ~Locked() {
      Report on_problem = problems_.empty() ? Report() : device_.on_problem_;
      WaitReport on_wait = waits_.empty() ? WaitReport() : device_.on_wait_;
      Report on_launch = launched_.empty() ? Report() : device_.on_launch_;
      device_.mutex_.unlock();
      if (on_problem) for (auto& what : problems_) on_problem(what);
      if (on_wait) for (auto& [why, since] : waits_) on_wait(why, since);
      if (on_launch) for (auto& what : launched_) on_launch(what);
    }
    void problem(std::string what) { problems_.push_back(std::move(what)); }
    void wait(std::string why, int64_t since) { waits_.emplace_back(std::move(why), since); }
    void launched(std::string what) { launched_.push_back(std::move(what)); }
    void let_go(Kept kept) { garbage_.push_back(std::move(kept)); }

   private:
    Device& device_;
    std::vector<std::string> problems_, launched_;
    std::vector<std::pair<std::string, int64_t>> waits_;
    std::vector<Kept> garbage_;
  };

  static char* new_memory(size_t bytes, unsigned char filled_with) {
    char* memory = static_cast<char*>(std::aligned_alloc(512, (bytes / 512 + 1) * 512));
    std::memset(memory, filled_with, bytes);
    return memory;
  }
  void count(int64_t bytes) {
    used_ += bytes;
    peak_ = std::max(peak_, used_);
  }
  void give_back(char* memory) {
    auto found = blocks_.find(memory);
    if (found != blocks_.end()) {
      if (found->second.counted) used_ -= found->second.bytes;
      blocks_.erase(found);
    }
    std::free(memory);
  }

  void host_has_waited(Locked& lock, const std::string& why, int64_t since) {
    if (captures_) lock.problem("the host waits in a capture: " + why);
    lock.wait(why, since);
  }

  Tick advance(Stream stream) {
    clocks_[stream].join(host_);  // what the host launches comes after all that it has waited for
    return clocks_[stream].advance(stream);
  }

  Block* block_of(char* memory) {
    auto after = blocks_.upper_bound(memory);
    if (after == blocks_.begin()) return nullptr;
    auto& [begin, block] = *--after;
    return memory < begin + std::max<size_t>({block.bytes, block.room, 1}) ? &block : nullptr;
  }

  void access(Locked& lock, Access now) {
    Block* block = block_of(now.region.begin);
    if (!block) return lock.problem(now.operation + " uses memory that is not of the device");
    if (!freed_.empty()) use_again(lock, *block, now);
    auto precedes = [&](const Message& message) { return message.stream == now.stream; };
    if (std::any_of(messages_.begin(), messages_.end(), precedes))
      deliver(lock, clocks_[now.stream]);  // in the order of the stream, its results are there
    for (auto& before : block->accesses) {
      if (before.stream == now.stream || !(before.write || now.write) || !before.region.overlaps(now.region)) continue;
      if (!clocks_[now.stream].knows(before.stream, before.tick))
        lock.problem("race: " + now.operation + (now.write ? " writes" : " reads") + " on stream " + std::to_string(now.stream) +
                     " what " + before.operation + (before.write ? " writes" : " reads") + " on stream " +
                     std::to_string(before.stream));
    }
    // Who is ordered after this access is ordered after those that it hides, or has been reported with it.
    auto hidden = [&](const Access& before) {
      return now.region.contains(before.region) && (now.write || (before.stream == now.stream && !before.write));
    };
    auto& accesses = block->accesses;
    accesses.erase(std::remove_if(accesses.begin(), accesses.end(), hidden), accesses.end());
    accesses.push_back(std::move(now));
  }

  // Whether an access is known to have ended, to the host or on this stream.
  bool ended(const Access& access, Stream stream) {
    return clocks_[stream].knows(access.stream, access.tick) || host_.knows(access.stream, access.tick) || ended_.knows(access.stream, access.tick);
  }

  // A block that was allocated later may lie in freed memory.
  void use_again(Locked& lock, const Block& block, const Access& now) {
    for (auto& freed : freed_) {
      const bool here = freed.stream == block.stream && freed.number < block.number;
      auto over = [&](const Access& before) {
        if (ended(before, freed.stream)) return true;
        if (!here || ended(before, now.stream)) return false;
        lock.problem("memory of stream " + std::to_string(freed.stream) + " is freed and may be used by " + now.operation + " while " +
                     before.operation + " uses it on stream " + std::to_string(before.stream));
        return true;
      };
      auto& accesses = freed.accesses;
      accesses.erase(std::remove_if(accesses.begin(), accesses.end(), over), accesses.end());
    }
    auto done = [](const Freed& freed) { return freed.accesses.empty(); };
    freed_.erase(std::remove_if(freed_.begin(), freed_.end(), done), freed_.end());
  }

  void deliver(Locked& lock, const Clock& known, bool for_a_callback = false) {
    for (auto message = messages_.begin(); message != messages_.end();) {
      if (!known.knows(message->stream, message->tick)) {
        ++message;
        continue;
      }
      for (auto& result : message->results) {
        auto hidden = [](char byte) { return static_cast<unsigned char>(byte) == ON_ITS_WAY; };
        if (!std::all_of(result.place, result.place + result.bytes.size(), hidden))
          lock.problem("memory of " + message->operation + " was written while it was on its way");
        std::memcpy(result.place, result.bytes.data(), result.bytes.size());
      }
      if (for_a_callback)
        shelf_.push_back(std::move(*message));
      else
        lock.let_go(std::move(message->kept));
      message = messages_.erase(message);
    }
    for (; shelf_.size() > SHELF; shelf_.pop_front()) {
      ended_.raise(shelf_.front().stream, shelf_.front().tick);
      lock.let_go(std::move(shelf_.front().kept));
    }
  }

  // Of copies that the host knows to have ended, in the order in which they were launched.
  void end_copies(Locked& lock) { end_copies(lock, host_, nullptr); }

  // Of those that somebody knows to have ended, from or to one place or any.
  void end_copies(Locked& lock, const Clock& known, const char* place_of) {
    for (auto copy = copies_.begin(); copy != copies_.end();) {
      if ((place_of && copy->results[0].place != place_of) || !known.knows(copy->stream, copy->tick)) {
        ++copy;
        continue;
      }
      auto& [place, bytes] = copy->results[0];
      if (copy->to_host)
        std::memcpy(place, bytes.data(), bytes.size());
      else if (copy->version() != copy->before || std::memcmp(place, bytes.data(), bytes.size()))
        lock.problem("pinned memory was written while " + copy->operation + " read it");
      lock.let_go(std::move(copy->kept));
      copy = copies_.erase(copy);
    }
  }

  std::mutex mutex_;
  std::map<Stream, Clock> clocks_;
  Clock host_;  // what the host has waited for
  std::map<char*, Block> blocks_;
  std::map<Pool, OfGraphs> pools_;
  std::vector<Freed> freed_;
  std::vector<Message> messages_;
  std::vector<Copy> copies_;
  std::deque<Message> shelf_;  // delivered to callbacks only
  Clock ended_;                // what has left the shelf
  std::map<std::string, int64_t> operations_;
  int64_t launched_ = 0, used_ = 0, peak_ = 0, serial_ = 0;
  bool captures_ = false;
  std::set<std::string> looked_for_;
  Report on_problem_, on_launch_;
  WaitReport on_wait_;
};

}  // namespace emulated
