// Stands in for the RowTeam of templates/row.h where a host compiler takes a row kernel: one thread is the whole team,
// and one team each group of rows.
#pragma once
#include "row.h"

struct SerialTeam {
  int threads = 1, first = 0, block = 0;
  bool leads() const { return true; }
  bool stores_totals() const { return true; }
  template <class R> void begin(int, typename R::State&) const {}
  void wait() const {}
  template <class R> void end(int, typename R::State&) const {}
  void next() const {}
  template <class R, int kCount> void join(typename R::State (&)[kCount]) const {}
};

template <class Part, int kOctets, bool kVector = false> void run_rows(typename Part::Launch const& p) {
  int64_t const of_group = p.groups > 0 ? p.rows / p.groups : 0;
  for (int group = 0; group < p.groups; ++group) {
    SerialTeam team;
    team.block = group;
    typename Part::template Totals<kOctets> totals;
    for (int64_t row = group * of_group, end = row + of_group; row < end; ++row)
      Part::template row<kOctets, kVector>(p, team, coda::Place<Part::Launch::kLevels>(p, row, end), totals);
    totals.store(p, team);
  }
}

template <int kOctets, class Part, class... Others, class Launch> void run_parts(Launch const& p) {
  run_rows<Part, kOctets>(p.part);
  if constexpr (sizeof...(Others) > 0) run_parts<kOctets, Others...>(p.others);
}
