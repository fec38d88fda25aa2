// Stands in for the RowTeam of templates/row.h where a host compiler takes a row kernel: one thread is the whole team,
// and one team the whole grid.
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
  template <class R, int kCount> void join(float (&)[kCount]) const {}
};

template <class Body, int kOctets, bool kVector = false> void run_rows(typename Body::Launch const& p) {
  SerialTeam team;
  typename Body::template Totals<kOctets> totals;
  for (int row = 0; row < p.rows; ++row)
    Body::template row<kOctets, kVector>(p, team, coda::Place<Body::Launch::kLevels>(p, row), totals);
  totals.store(p, team);
}
