// Vector clocks, and the history of memory: which access is not ordered behind another.
#include <cstdlib>

#include "state.h"

namespace sim {
namespace {

struct Epoch {
  int actor = -1;
  uint64_t time = 0;
  const std::string* what = nullptr;
};

struct Cell {
  uintptr_t end = 0;
  Epoch write;
  std::vector<Epoch> reads;
};

auto& cells = *new std::map<uintptr_t, Cell>;
auto& names = *new std::vector<std::string>;
auto& words = *new std::set<std::string>;
auto& reports = *new std::vector<std::string>;

const std::string* word(const std::string& text) { return &*words.insert(text).first; }

void split(uintptr_t at) {
  auto it = cells.upper_bound(at);
  if (it == cells.begin()) return;
  --it;
  if (it->first < at && at < it->second.end) {
    Cell right = it->second;
    it->second.end = at;
    cells.emplace(at, std::move(right));
  }
}

bool knows(const Clock& clock, const Epoch& epoch) {
  return epoch.actor < 0 ||
         (static_cast<size_t>(epoch.actor) < clock.size() && clock[epoch.actor] >= epoch.time);
}

void complain(int actor, const std::string& what, bool writes, const Epoch& other, bool other_writes, uintptr_t at) {
  char place[32];
  snprintf(place, sizeof place, "%#lx", static_cast<unsigned long>(at));
  report(names[actor] + " " + (writes ? "writes" : "reads") + " " + place + " (" + what + "), not ordered behind " +
         names[other.actor] + ", which " + (other_writes ? "writes" : "reads") + " it (" + *other.what + ")");
}

}  // namespace

int new_actor(std::string name) {
  names.push_back(std::move(name));
  return static_cast<int>(names.size()) - 1;
}

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i)
    if (into[i] < other[i]) into[i] = other[i];
}

uint64_t tick(Clock& clock, int actor) {
  if (clock.size() <= static_cast<size_t>(actor)) clock.resize(actor + 1);
  return ++clock[actor];
}

void access(int actor, const Clock& clock, const std::vector<Range>& ranges, const std::string& what) {
  const Epoch me{actor, static_cast<size_t>(actor) < clock.size() ? clock[actor] : 0, word(what)};
  for (const Range& range : ranges) {
    if (!range.bytes) continue;
    const uintptr_t begin = range.begin, end = begin + range.bytes;
    split(begin);
    split(end);
    uintptr_t at = begin;
    auto it = cells.lower_bound(begin);
    bool told = false;
    while (at < end) {
      if (it == cells.end() || it->first > at) {
        const uintptr_t until = it == cells.end() ? end : std::min(end, it->first);
        Cell fresh;
        fresh.end = until;
        it = cells.emplace_hint(it, at, std::move(fresh));
      }
      Cell& cell = it->second;
      if (!told && !knows(clock, cell.write)) {
        complain(actor, what, range.writes, cell.write, true, at);
        told = true;
      }
      if (range.writes) {
        for (const Epoch& read : cell.reads)
          if (!told && !knows(clock, read)) {
            complain(actor, what, true, read, false, at);
            told = true;
          }
        cell.reads.clear();
        cell.write = me;
      } else {
        bool found = false;
        for (Epoch& read : cell.reads)
          if (read.actor == actor) {
            read = me;
            found = true;
          }
        if (!found) cell.reads.push_back(me);
      }
      at = cell.end;
      ++it;
    }
  }
}

void forget(uintptr_t begin, size_t bytes) {
  split(begin);
  split(begin + bytes);
  cells.erase(cells.lower_bound(begin), cells.lower_bound(begin + bytes));
}

void report(const std::string& text) {
  reports.push_back(text);
  if (getenv("SIM_CUDA_LOUD")) fprintf(stderr, "simulated CUDA: %s\n", text.c_str());
}

}  // namespace sim

// The reports until now, one a line, which are forgotten if `take`. The text stays valid until the next call.
extern "C" const char* sim_reports(int take) {
  static std::string* text = new std::string;
  std::lock_guard<std::mutex> lock(sim::mutex);
  text->clear();
  for (const std::string& one : sim::reports) *text += one + "\n";
  if (take) sim::reports.clear();
  return text->c_str();
}
