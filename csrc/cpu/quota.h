// The processors that a container's quota lets this process use: cpu.max of its cgroup and of those above it, or
// cpu.cfs_quota_us where cgroups are of version 1.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace pass_ext {

// The first line of a file; empty if there is none.
inline std::string first_line(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return {};
  char line[64] = "";
  const bool is_read = std::fgets(line, sizeof line, file) != nullptr;
  std::fclose(file);
  return is_read ? line : "";
}

// The whole processors that one cgroup's quota fills, the last one in part; INT_MAX without a quota.
inline int processors_of_cgroup(const std::string& folder) {
  std::string quota = first_line(folder + "/cpu.max"), period;
  if (quota.empty()) {
    quota = first_line(folder + "/cpu.cfs_quota_us");
    period = first_line(folder + "/cpu.cfs_period_us");
  } else {
    period = quota.substr(std::min(quota.find(' '), quota.size()));
  }
  const long long time = std::atoll(quota.c_str()), each = std::atoll(period.c_str());  // "max" and -1: no quota
  return time > 0 && each > 0 ? static_cast<int>(std::min<long long>((time + each - 1) / each, INT_MAX)) : INT_MAX;
}

// At least 1; INT_MAX where nothing is limited. `root` lies in front of /proc and /sys.
inline int processors_of_quota(const std::string& root) {
  std::FILE* const file = std::fopen((root + "/proc/self/cgroup").c_str(), "re");
  if (file == nullptr) return INT_MAX;
  int processors = INT_MAX;
  char line[4096];
  while (std::fgets(line, sizeof line, file) != nullptr) {  // number:controllers:path
    char* const controllers = std::strchr(line, ':');
    char* const path = controllers == nullptr ? nullptr : std::strchr(controllers + 1, ':');
    if (path == nullptr) continue;
    *path = 0;
    const std::string names = std::string(",") + (controllers + 1) + ",";
    const bool is_version_2 = names == ",,";
    if (!is_version_2 && names.find(",cpu,") == std::string::npos) continue;
    // Inside a container the path may be that of the host; then the limit lies at the top.
    std::string below(path + 1, std::strcspn(path + 1, "\n"));
    const std::string top = root + (is_version_2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu");
    for (;;) {
      processors = std::min(processors, processors_of_cgroup(top + below));
      if (below.empty()) break;
      below.resize(below.find_last_of('/') == std::string::npos ? 0 : below.find_last_of('/'));
    }
  }
  std::fclose(file);
  return processors;
}

}  // namespace pass_ext
