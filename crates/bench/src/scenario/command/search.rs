//! Search for the largest number of sidecars within limits, which is the capacity rule of AKS's study.

use std::{collections::BTreeMap, fmt::Display};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use skysail_core::stdio;

use super::format::CommandMeasurement;
use crate::scenario::{
    cases::is_metric,
    document::{Checked, ensure, within},
    format::Figure,
};

/// Figure of a search: its result.
pub(super) const MOST: &str = "most_sidecars";
/// Argument that the search sets.
const SIDECARS: &str = "--sidecars";
/// Maximum number of sidecars.
const MAX_SIDECARS: f64 = 200_000.0;

/// Search of a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CapacitySearch {
    /// First number of sidecars to try, which is doubled until a limit is exceeded.
    from: u32,
    /// Maximum number of sidecars to try.
    to: u32,
    /// Number of trials between the largest number within the limits and the least beyond them.
    steps: u32,
    /// Maximum of figures by their names.
    limits: BTreeMap<String, f64>,
}

/// A number of sidecars that was tried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct CapacityTrial {
    sidecars: u32,
    /// The limit that was exceeded, or the error of the benchmark.
    beyond: Option<String>,
}

impl CapacitySearch {
    /// Returns the search with at most this number of sidecars.
    pub(super) fn up_to(&self, most: Option<u32>) -> Self {
        let to = most.unwrap_or(u32::MAX).min(self.to);
        // At least two trials: the first number is doubled once.
        Self { from: self.from.min((to / 2).max(1)), to, ..self.clone() }
    }

    /// Checks the bounds. `field` is that of the case.
    pub(super) fn check<'a>(
        &self,
        field: &str,
        figures: impl Iterator<Item = &'a Figure> + Clone,
    ) -> Checked {
        let field = |name: &str| format!("{field}.search.{name}");
        within(&field("to"), f64::from(self.to), 1.0, MAX_SIDECARS)?;
        within(&field("from"), f64::from(self.from), 1.0, f64::from(self.to))?;
        within(&field("steps"), f64::from(self.steps), 0.0, 10.0)?;
        ensure(!self.limits.is_empty(), &field("limits"), || "must have a limit".to_owned())?;
        for (metric, limit) in &self.limits {
            let field = field(&format!("limits.{metric}"));
            is_metric(&field, metric, figures.clone())?;
            within(&field, *limit, 0.0, 1e12)?;
        }
        Ok(())
    }

    /// Returns the limits for the legend.
    pub(super) fn text(&self) -> String {
        let limits = self.limits.iter().map(|(metric, limit)| format!("{metric} {limit}"));
        format!("from {} to {}, within {}", self.from, self.to, limits.collect::<Vec<_>>().join(", "))
    }

    /// Searches, and returns the result of the largest number of sidecars within the limits.
    ///
    /// # Errors
    /// The first number of sidecars is beyond a limit.
    pub(super) async fn run(
        &self,
        measure: impl AsyncFn(u32) -> anyhow::Result<CommandMeasurement>,
    ) -> anyhow::Result<CommandMeasurement> {
        let (mut trials, mut best) = (Vec::new(), None);
        while let Some(sidecars) = self.next(&trials) {
            let beyond = match measure(sidecars).await {
                Ok(measured) => {
                    let beyond = self.beyond(&measured.figures);
                    if beyond.is_none() {
                        best = Some(measured);
                    }
                    beyond
                }
                Err(error) => Some(format!("{error:#}")),
            };
            let shown = beyond.as_deref().unwrap_or("within the limits");
            stdio::print_error(format_args!("{sidecars} sidecars: {shown}"));
            trials.push(CapacityTrial { sidecars, beyond });
        }
        let refused = || {
            let why = trials.first().and_then(|trial| trial.beyond.as_deref()).unwrap_or_default();
            format!("{} sidecars are beyond the limits: {why}", self.from)
        };
        let mut best: CommandMeasurement = best.with_context(refused)?;
        best.figures.insert(MOST.to_owned(), best.sidecars as f64);
        best.searched = trials;
        Ok(best)
    }

    /// Returns the next number of sidecars; `None` at the end of the search.
    fn next(&self, trials: &[CapacityTrial]) -> Option<u32> {
        let Some(last) = trials.last() else { return Some(self.from) };
        let Some(first) = trials.iter().position(|trial| trial.beyond.is_some()) else {
            return (last.sidecars < self.to).then(|| last.sidecars.saturating_mul(2).min(self.to));
        };
        let beyond =
            trials.iter().filter(|trial| trial.beyond.is_some()).map(|trial| trial.sidecars).min()?;
        let within = trials.iter().filter(|trial| trial.beyond.is_none() && trial.sidecars < beyond);
        let within = within.map(|trial| trial.sidecars).max()?;
        let next = (f64::from(within) * f64::from(beyond)).sqrt().round() as u32;
        let is_done = trials.len() - first > self.steps as usize;
        (!is_done && next > within && next < beyond).then_some(next)
    }

    /// Returns the first limit that these figures exceed.
    fn beyond(&self, figures: &BTreeMap<String, f64>) -> Option<String> {
        self.limits.iter().find_map(|(metric, limit)| match figures.get(metric) {
            Some(value) if value <= limit => None,
            Some(value) => Some(format!("{metric} is {value:.1}, at most {limit}")),
            None => Some(format!("{metric} was not measured")),
        })
    }
}

/// Returns the arguments with this number of sidecars.
pub(super) fn with_sidecars(arguments: &str, sidecars: impl Display) -> String {
    let (mut words, mut all) = (arguments.split_whitespace(), Vec::new());
    while let Some(word) = words.next() {
        if word == SIDECARS {
            words.next();
        } else if !word.starts_with("--sidecars=") {
            all.push(word);
        }
    }
    format!("{} {SIDECARS} {sidecars}", all.join(" ")).trim_start().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches where the figure is the number of sidecars, and the benchmark fails from 3,000 on. Returns the numbers
    /// that were tried, and the result.
    fn search(limit: f64, steps: u32) -> (Vec<u32>, anyhow::Result<u64>) {
        let limits = [("peak_mb".to_owned(), limit)].into();
        let search = CapacitySearch { from: 100, to: 3_000, steps, limits };
        let tried = std::cell::RefCell::new(Vec::new());
        let result = search.run(async |sidecars| {
            tried.borrow_mut().push(sidecars);
            anyhow::ensure!(sidecars < 3_000, "out of memory");
            let figures = [("peak_mb".to_owned(), f64::from(sidecars))].into();
            Ok(CommandMeasurement { sidecars: sidecars.into(), figures, searched: Vec::new() })
        });
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let result = runtime.block_on(result).map(|measured| {
            assert_eq!(measured.figures[MOST], measured.sidecars as f64);
            assert_eq!(measured.searched.len(), tried.borrow().len());
            measured.sidecars
        });
        (tried.into_inner(), result)
    }

    #[test]
    fn a_search_doubles_and_then_halves_the_range() {
        let (tried, result) = search(700.0, 2);
        assert_eq!((tried, result.unwrap()), (vec![100, 200, 400, 800, 566, 673], 673));
        let (tried, result) = search(1e9, 1);
        assert_eq!((tried, result.unwrap()), (vec![100, 200, 400, 800, 1_600, 3_000, 2_191], 2_191));
        assert_eq!(search(1e9, 0).1.unwrap(), 1_600);
        let (tried, result) = search(50.0, 5);
        let error = result.unwrap_err().to_string();
        assert_eq!(tried, [100]);
        assert_eq!(error, "100 sidecars are beyond the limits: peak_mb is 100.0, at most 50");
    }

    #[test]
    fn the_number_of_sidecars_is_replaced() {
        for arguments in ["--churn 5", "--sidecars 7 --churn 5", "--churn 5 --sidecars=7"] {
            assert_eq!(with_sidecars(arguments, 9), "--churn 5 --sidecars 9");
        }
        assert_eq!(with_sidecars("", 9), "--sidecars 9");
    }
}
