// Bounds, initialisation and happens-before, byte by byte; see memory.h.
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace emulator {
namespace {

constexpr uint8_t kWritten = 1, kInFlight = 2;

// Zero pages that cost nothing until they are touched, so that a large buffer is no slower than its accesses.
Byte* reserve_bytes(size_t count) {
  void* const pages =
      mmap(nullptr, count * sizeof(Byte), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  madvise(pages, count * sizeof(Byte), MADV_NOHUGEPAGE);
  return static_cast<Byte*>(pages);
}

// Keeps the stamps of two threads, and in global memory of two blocks where there were two, else a block's own many
// accesses would drive out the one of another block.
void remember(Stamp (&stamps)[2], Stamp now, bool is_shared) {
  const bool holds_other_block = stamps[1] && stamps[1].block() != now.block() && stamps[0].block() == now.block();
  if (!now.is_of_same_thread(stamps[0]) && (is_shared || !holds_other_block)) stamps[1] = stamps[0];
  stamps[0] = now;
}

}  // namespace

Memory::Memory(char* shared, size_t shared_bytes)
    : shared_(shared), shared_bytes_(shared_bytes), shared_stamps_(reserve_bytes(shared_bytes)) {}

void Memory::add_buffer(const std::string& name, void* address, size_t bytes, Content content) {
  auto region = std::make_unique<Region>(Region{name, static_cast<char*>(address), bytes, content, false, nullptr, {}});
  if (content != Content::read_only) region->bytes = reserve_bytes(bytes);
  if (content == Content::uninitialised) {
    region->flags.resize(bytes);
    memset(address, 0xff, bytes);
  }
  regions_.push_back(std::move(region));
  recent_.fill(nullptr);
}

void Memory::tell_buffer(const std::string& name, void* address, size_t bytes, Content content) {
  char* const begin = static_cast<char*>(address);
  if (content == Content::uninitialised) {  // what lay there was freed
    const auto is_gone = [=](const auto& r) { return r->begin < begin + bytes && begin < r->begin + r->size; };
    for (auto& region : regions_)
      if (is_gone(region)) release_bytes(*region);
    regions_.erase(std::remove_if(regions_.begin(), regions_.end(), is_gone), regions_.end());
  } else {
    for (auto& region : regions_) {
      if (region->begin != begin || region->size < bytes) continue;
      if (content == Content::initialised && region->content == Content::read_only) {
        region->content = content;
        region->bytes = reserve_bytes(region->size);
      }
      return;
    }
  }
  add_buffer(name.empty() ? "output " + std::to_string(unnamed_++) : name, address, bytes, content);
}

void Memory::add_shared(const std::string& name, void* address, size_t bytes) {
  char* const begin = static_cast<char*>(address);
  regions_.push_back(std::make_unique<Region>(Region{name, begin, bytes, Content::uninitialised, true,
                                                     shared_stamps_ + (begin - shared_), std::vector<uint8_t>(bytes)}));
  memset(address, 0xff, bytes);
  recent_.fill(nullptr);
}

void Memory::release_bytes(Region& region) {
  if (region.bytes && !region.is_shared) munmap(region.bytes, region.size * sizeof(Byte));
}

void Memory::forget_shared() {
  regions_.erase(std::remove_if(regions_.begin(), regions_.end(), [](const auto& r) { return r->is_shared; }),
                 regions_.end());
  recent_.fill(nullptr);
  acquired_.clear();
}

void Memory::forget_order() {
  for (auto& region : regions_)
    if (region->bytes && !region->is_shared) madvise(region->bytes, region->size * sizeof(Byte), MADV_DONTNEED);
  madvise(shared_stamps_, shared_bytes_ * sizeof(Byte), MADV_DONTNEED);
  published_.clear();
}

void Memory::forget_temporary() {
  while (regions_.size() > permanent_) {
    release_bytes(*regions_.back());
    regions_.pop_back();
  }
  recent_.fill(nullptr);
}

void Memory::forget_all() {
  permanent_ = unnamed_ = 0;
  forget_temporary();
  published_.clear();
  acquired_.clear();
}

Memory::Region* Memory::find(const void* address) {
  const char* a = static_cast<const char*>(address);
  const auto holds = [a](const Region* r) { return a >= r->begin && a < r->begin + r->size; };
  Region*& recent = recent_[reinterpret_cast<uintptr_t>(address) >> 8 & (recent_.size() - 1)];
  if (recent && holds(recent)) return recent;
  for (auto& region : regions_)
    if (holds(region.get())) return recent = region.get();
  return nullptr;
}

Place Memory::place_of(const void* address) {
  if (is_shared(address)) return Place::shared;
  const Region* const region = find(address);
  if (!region) return Place::nowhere;
  if (region->name == kParameters) return Place::parameters;
  return region->content == Content::read_only ? Place::read_only : Place::written;
}

std::string Memory::nearest(const void* address) const {
  const char* a = static_cast<const char*>(address);
  std::ostringstream text;
  for (const auto& region : regions_) {
    const long past = a - (region->begin + region->size), before = region->begin - a;
    if (past >= 0 && past < 4096) text << ", " << past << " bytes past the end of " << region->name;
    if (before > 0 && before < 4096) text << ", " << before << " bytes before the start of " << region->name;
  }
  return text.str();
}

std::string Memory::describe(const Region& region, const void* address, size_t bytes) const {
  std::ostringstream text;
  text << bytes << " bytes at offset " << static_cast<const char*>(address) - region.begin << " of " << region.name;
  return text.str();
}

bool Memory::knows_address(const std::vector<Acquisition>& acquisitions, const Observer& me) const {
  return std::any_of(acquisitions.begin(), acquisitions.end(),
                     [&](const Acquisition& a) { return me.knows(a.thread, a.clock); });
}

bool Memory::is_ordered(const Region& region, Stamp earlier, const Observer& me) const {
  if (!earlier) return true;
  if (earlier.block() == me.block) return me.knows(earlier.thread(), earlier.clock());
  return region.is_shared || is_published(earlier, me);  // shared: by a block that is gone, with its shared memory
}

bool Memory::is_published(Stamp earlier, const Observer& me) const {
  for (const auto& [address, acquisitions] : acquired_) {
    const auto& at_address = published_.at(address);
    const auto past = at_address.find(earlier.block());
    if (past != at_address.end() && earlier.clock() < past->second[earlier.thread()] && knows_address(acquisitions, me))
      return true;
  }
  return false;
}

namespace {

const char* verb_of(Access kind) {
  return kind == Access::read ? "reads " : kind == Access::write ? "writes " : "atomically updates ";
}

template <typename... Parts>
std::string say(Parts&&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace

std::string Memory::conflict(const Region& region, const void* address, size_t bytes, Access kind, Stamp other,
                             const char* what, const Observer& me) const {
  const bool same_block = other.block() == me.block;
  return say("race: ", verb_of(kind), describe(region, address, bytes), ", which thread ", other.thread(),
             same_block ? "" : say(" of block ", other.block()), ' ', what,
             same_block ? " with no barrier in between" : " with no fence and atomic in between");
}

bool Memory::access(const void* address, size_t bytes, Access kind, const Observer& me, bool counts) {
  Region* const region = find(address);
  if (!region || bytes > region->size - (static_cast<const char*>(address) - region->begin))
    return fails_outside(region, address, bytes, kind);
  if (counts) {
    if (kind != Access::write) region->traffic.loaded += bytes;
    if (kind != Access::read) region->traffic.stored += bytes;
  }
  if (region->content == Content::read_only && kind == Access::read) return true;
  return record(*region, address, bytes, kind, me);
}

bool Memory::fails_outside(const Region* region, const void* address, size_t bytes, Access kind) {
  wrong_ = region
               ? say("out of bounds: ", verb_of(kind), describe(*region, address, bytes), ", which has ", region->size)
               : say("out of bounds: ", verb_of(kind), bytes, " bytes that no buffer holds", nearest(address));
  return false;
}

void Memory::split_units(Region& region, size_t extent) {
  for (; extent & ((size_t{1} << region.shift) - 1); --region.shift)
    for (size_t i = region.size >> region.shift; i-- > 0;)
      for (const size_t half : {2 * i + 1, 2 * i}) {  // from the end: a half lies behind what is still to be split
        if (!(region.bytes[half] == region.bytes[i])) region.bytes[half] = region.bytes[i];
        if (!region.flags.empty()) region.flags[half] = region.flags[i];
      }
}

bool Memory::record(Region& region, const void* address, size_t bytes, Access kind, const Observer& me) {
  const auto fails = [&](std::string what) {
    wrong_ = std::move(what);
    return false;
  };
  if (region.content == Content::read_only)
    return fails(say("read-only: ", verb_of(kind), describe(region, address, bytes)));

  const size_t offset = static_cast<const char*>(address) - region.begin;
  const Stamp now(me.block, me.thread, me.clock());
  uint8_t* const flags = region.flags.empty() ? nullptr : region.flags.data();
  Byte before, after;  // of the unit in front: its neighbours mostly have the same past, which needs no second look
  uint8_t flag_before = 0, flag_after = 0;
  split_units(region, offset | bytes);
  const size_t first = offset >> region.shift, end = (offset + bytes) >> region.shift;
  for (size_t i = first; i < end; ++i) {
    Byte& byte = region.bytes[i];
    const uint8_t flag = flags ? flags[i] : kWritten;
    if (i > first && flag == flag_before && byte == before) {
      byte = after;
      if (flags) flags[i] = flag_after;
      continue;
    }
    before = byte;
    flag_before = flag_after = flag;
    if (flag & kInFlight)
      return fails(say("asynchronous copy: ", verb_of(kind), describe(region, address, bytes),
                       ", into which a copy is still under way (no copy_async_wait)"));
    if (kind != Access::write && !(flag & kWritten))
      return fails(
          say("uninitialised: ", verb_of(kind), describe(region, address, bytes), ", which nothing has written"));
    if (!is_ordered(region, byte.write, me))
      return fails(conflict(region, address, bytes, kind, byte.write, "wrote", me));
    if (kind != Access::atomic)
      for (const Stamp update : byte.update)
        if (!is_ordered(region, update, me))
          return fails(conflict(region, address, bytes, kind, update, "updated atomically", me));
    if (kind != Access::read)
      for (const Stamp read : byte.read)
        if (!is_ordered(region, read, me)) return fails(conflict(region, address, bytes, kind, read, "read", me));
    if (kind == Access::read) {
      remember(byte.read, now, region.is_shared);
    } else {
      if (kind == Access::atomic)
        remember(byte.update, now, region.is_shared);
      else
        byte = Byte{now, {}, {}};  // whoever is ordered behind this write is ordered behind all before it
      flag_after |= kWritten;
      if (flags) flags[i] = flag_after;
    }
    after = byte;
  }
  return true;
}

std::map<std::string, Traffic> Memory::traffic() const {
  std::map<std::string, Traffic> found;
  for (const auto& region : regions_)
    if (!region->is_shared && region->name != kParameters) found[region->name] = region->traffic;
  return found;
}

std::string Memory::begin_async_write(void* address, size_t bytes, const Observer& me) {
  const Region* target = find(address);
  if (target && !target->is_shared)
    return "copy_async: the target " + describe(*target, address, bytes) + " is not shared";
  if (!access(address, bytes, Access::write, me, false)) return wrong_;
  Region& region = *find(address);
  const size_t offset = static_cast<char*>(address) - region.begin;
  std::fill_n(region.flags.begin() + static_cast<long>(offset >> region.shift), bytes >> region.shift, kInFlight);
  memset(address, 0xff, bytes);
  return "";
}

void Memory::finish_async_write(void* address, size_t bytes, const Observer& me) {
  Region& region = *find(address);
  const size_t offset = static_cast<char*>(address) - region.begin;
  for (size_t i = offset >> region.shift; i < (offset + bytes) >> region.shift; ++i) {
    region.flags[i] = kWritten;
    region.bytes[i] = Byte{Stamp(me.block, me.thread, me.clock()), {}, {}};
  }
}

std::string Memory::check_streaming(const void* address, size_t bytes) {
  const Region* region = find(address);
  if (!region) return "";  // the load itself will report it
  if (region->is_shared) return "load16_streaming: " + describe(*region, address, bytes) + " is shared memory";
  if (region->content == Content::read_only) return "";
  const size_t offset = static_cast<const char*>(address) - region->begin;
  const size_t end = (std::min(offset + bytes, region->size) - 1) >> region->shift;
  for (size_t i = offset >> region->shift; i <= end; ++i)
    if (region->bytes[i].write || region->bytes[i].update[0])
      return "load16_streaming: " + describe(*region, address, bytes) + " was written in this launch";
  return "";
}

void Memory::synchronise(const void* address, const Past* fenced, const Observer& me) {
  auto& at_address = published_[address];
  if (at_address.size() > at_address.count(me.block)) {
    auto& acquisitions = acquired_[address];
    if (!knows_address(acquisitions, me)) acquisitions.push_back({me.thread, me.clock()});
  }
  if (!fenced) return;
  const auto publish = [&](unsigned block, const Past& past) {
    Past& known = at_address[block];
    known.resize(kMostThreads);
    for (size_t i = 0; i < past.size(); ++i) known[i] = std::max(known[i], past[i]);
  };
  publish(me.block, *fenced);
  for (const auto& [other, acquisitions] : acquired_)  // and what this thread learned elsewhere it passes on
    if (other != address && knows_address(acquisitions, me))
      for (const auto& [block, past] : published_.at(other))
        if (block != me.block) publish(block, past);
}

}  // namespace emulator
