// Bounds, initialisation and happens-before, byte by byte; see memory.h.
#include "memory.h"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace emulator {

void Memory::add_region(Region region) {
  if (region.content != Content::read_only) region.bytes.resize(region.size);
  if (region.content == Content::uninitialised) memset(region.begin, 0xff, region.size);
  if (region.content == Content::initialised)
    for (Byte& byte : region.bytes) byte.initialised = true;
  regions_.push_back(std::make_unique<Region>(std::move(region)));
  last_ = nullptr;
}

void Memory::drop_shared_regions() {
  regions_.erase(std::remove_if(regions_.begin(), regions_.end(), [](const auto& r) { return r->is_shared; }),
                 regions_.end());
  last_ = nullptr;
}

void Memory::drop_all_regions() {
  regions_.clear();
  last_ = nullptr;
  published_.clear();
  acquired_.clear();
}

void Memory::forget_stamps() {
  for (auto& region : regions_)
    for (Byte& byte : region->bytes) {
      byte.write = byte.atomic = byte.read[0] = byte.read[1] = Stamp();
      byte.in_flight = false;
    }
  published_.clear();
}

void Memory::forget_acquisitions() { acquired_.clear(); }

Region* Memory::find(const void* address) {
  const char* a = static_cast<const char*>(address);
  const auto holds = [a](const Region* r) { return a >= r->begin && a < r->begin + r->size; };
  if (last_ && holds(last_)) return last_;
  for (auto& region : regions_)
    if (holds(region.get())) return last_ = region.get();
  return nullptr;
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

bool Memory::is_ordered(Stamp earlier, const Observer& me) const {
  if (!earlier) return true;
  if (earlier.block() != me.block) {
    const auto found = acquired_.find(earlier.block());
    if (found == acquired_.end()) return false;
    const Acquired& acquired = found->second;
    const bool was_published =
        earlier.epoch() < acquired.release.epoch ||
        (earlier.thread() == acquired.release.thread && earlier.epoch() == acquired.release.epoch);
    const bool reached_me = acquired.by_thread == me.thread || acquired.at_epoch < me.epoch;
    return was_published && reached_me;
  }
  if (earlier.thread() == me.thread || earlier.epoch() < me.epoch) return true;
  return earlier.thread() / 32 == me.thread / 32 && earlier.clock() < me.seen[earlier.thread() % 32];
}

std::string Memory::access(const void* address, size_t bytes, Access kind, const Observer& me) {
  static const char* const kVerb[] = {"reads ", "writes ", "atomically updates "};
  const std::string verb = kVerb[static_cast<int>(kind)];
  Region* region = find(address);
  if (!region)
    return "out of bounds: " + verb + std::to_string(bytes) + " bytes that no buffer holds" + nearest(address);
  const size_t offset = static_cast<const char*>(address) - region->begin;
  if (offset + bytes > region->size)
    return "out of bounds: " + verb + describe(*region, address, bytes) + ", which has " + std::to_string(region->size);
  if (region->content == Content::read_only)
    return kind == Access::read ? "" : "read-only: " + verb + describe(*region, address, bytes);

  const auto conflict = [&](Stamp other, const char* what) {
    std::ostringstream text;
    text << "race: " << verb << describe(*region, address, bytes) << ", which thread " << other.thread();
    if (other.block() != me.block) text << " of block " << other.block();
    text << ' ' << what
         << (other.block() == me.block ? " with no barrier in between" : " with no fence and atomic in between");
    return text.str();
  };
  const Stamp now(me.block, me.thread, me.epoch, me.clock());
  for (size_t i = offset; i < offset + bytes; ++i) {
    Byte& byte = region->bytes[i];
    if (byte.in_flight)
      return "asynchronous copy: " + verb + describe(*region, address, bytes) +
             ", into which a copy is still under way (no copy_async_wait)";
    if (kind != Access::write && !byte.initialised)
      return "uninitialised: " + verb + describe(*region, address, bytes) + ", which nothing has written";
    if (!is_ordered(byte.write, me)) return conflict(byte.write, "wrote");
    if (kind != Access::atomic && !is_ordered(byte.atomic, me)) return conflict(byte.atomic, "updated atomically");
    if (kind != Access::read)
      for (Stamp read : byte.read)
        if (!is_ordered(read, me)) return conflict(read, "read");
    if (kind == Access::read) {
      if (byte.read[0].thread() != me.thread || byte.read[0].block() != me.block) byte.read[1] = byte.read[0];
      byte.read[0] = now;
    } else {
      (kind == Access::write ? byte.write : byte.atomic) = now;
      byte.initialised = true;
    }
  }
  return "";
}

std::string Memory::begin_async_write(void* address, size_t bytes, const Observer& me) {
  const Region* target = find(address);
  if (target && !target->is_shared)
    return "copy_async: the target " + describe(*target, address, bytes) + " is not shared";
  std::string error = access(address, bytes, Access::write, me);
  if (!error.empty()) return error;
  Region* region = find(address);
  const size_t offset = static_cast<char*>(address) - region->begin;
  for (size_t i = offset; i < offset + bytes; ++i) {
    region->bytes[i].in_flight = true;
    region->bytes[i].initialised = false;
  }
  memset(address, 0xff, bytes);
  return "";
}

void Memory::finish_async_write(void* address, size_t bytes, const Observer& me) {
  Region* region = find(address);
  const size_t offset = static_cast<char*>(address) - region->begin;
  for (size_t i = offset; i < offset + bytes; ++i) {
    region->bytes[i].in_flight = false;
    region->bytes[i].initialised = true;
    region->bytes[i].write = Stamp(me.block, me.thread, me.epoch, me.clock());
  }
}

std::string Memory::check_streaming(const void* address, size_t bytes) {
  const Region* region = find(address);
  if (!region) return "";  // the load itself will report it
  if (region->is_shared) return "load16_streaming: " + describe(*region, address, bytes) + " is shared memory";
  if (region->content == Content::read_only) return "";
  const size_t offset = static_cast<const char*>(address) - region->begin;
  for (size_t i = offset; i < std::min(offset + bytes, region->size); ++i)
    if (region->bytes[i].write || region->bytes[i].atomic)
      return "load16_streaming: " + describe(*region, address, bytes) + " was written in this launch";
  return "";
}

void Memory::synchronise(const void* address, bool publishes, const Observer& me) {
  auto& published = published_[address];
  for (const auto& [block, release] : published)
    if (block != me.block) acquired_[block] = Acquired{release, me.thread, me.epoch};
  if (!publishes) return;
  published[me.block] = Release{me.epoch, me.thread};
  for (const auto& [block, acquired] : acquired_) published.emplace(block, acquired.release);
}

}  // namespace emulator
