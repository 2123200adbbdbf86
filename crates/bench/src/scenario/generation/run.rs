//! Takes the turns of a scenario of generation, and checks its acceptance.

use std::time::{Duration, Instant};

use skysail_core::{shutdown, stdio};

use super::{
    format::{GenerationLimit, GenerationScenario},
    result::{GenerationReport, GenerationResult, GenerationRun, GenerationSettings, metrics},
};
use crate::{
    generation::{self, GenerationMeasurement, PreparedInput},
    peers::Peer,
    report::Machine,
    scenario::{BENCHMARK, FORMAT, format::SizeName},
    stage::{self, minutes},
};

/// Takes all turns. A signal ends them early.
///
/// # Errors
/// An object of an input is refused.
pub(in crate::scenario) fn run(
    scenario: GenerationScenario,
    size: SizeName,
    rounds: Option<u32>,
    machine: Machine,
) -> anyhow::Result<GenerationResult> {
    let of_size = scenario.sizes.of(size);
    let settings = GenerationSettings {
        inputs: scenario.inputs(size),
        rounds: rounds.unwrap_or(of_size.rounds),
        seconds: of_size.seconds,
        warmup: of_size.warmup,
    };
    let inputs: anyhow::Result<Vec<(&str, PreparedInput)>> =
        settings.inputs.iter().map(|input| Ok((input.name(), input.prepare()?))).collect();
    let inputs = inputs?;
    let (started, mut runs) = (stage::now(), Vec::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let interrupted = runtime.block_on(async {
        tokio::select! {
            biased;
            signal = shutdown::terminate() => signal.map(|_| true),
            () = take(&settings, &inputs, &mut runs) => Ok(false),
        }
    })?;
    drop(inputs);
    let program = std::env::current_exe()?;
    let mut report = GenerationReport {
        format: FORMAT,
        benchmark: BENCHMARK.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: stage::commit(),
        started,
        interrupted,
        machine,
        settings,
        peers: stage::versions(&[(Peer::Skysail, program)]),
        runs,
        summary: Vec::new(),
    };
    report.summarize();
    let violations = match size {
        SizeName::Default => violations(&scenario, &report),
        SizeName::Tiny => Vec::new(),
    };
    Ok(GenerationResult { scenario, size, violations, report })
}

/// Takes a turn of each input in each round. Disturbances of the machine therefore affect all inputs alike.
async fn take(
    settings: &GenerationSettings,
    inputs: &[(&str, PreparedInput)],
    runs: &mut Vec<GenerationRun>,
) {
    let [window, warmup] = [settings.seconds, settings.warmup].map(Duration::from_secs_f64);
    let (began, all) = (Instant::now(), inputs.len() * settings.rounds as usize);
    for round in 1..=settings.rounds {
        for (name, input) in inputs {
            let measured = generation::measure(input, warmup, window);
            let done = runs.len() + 1;
            let left = began.elapsed().div_f64(done as f64).mul_f64((all - done) as f64);
            let (measurement, error) = match measured {
                Ok(measurement) => (Some(measurement), None),
                Err(error) => (None, Some(format!("{error:#}"))),
            };
            let shown = match (&measurement, &error) {
                (Some(measured), _) => short(measured),
                (None, error) => format!("failed: {}", error.as_deref().unwrap_or_default()),
            };
            let left = minutes(left);
            stdio::print_error(format_args!("[{done}/{all}, {left} left] round {round}, {name}: {shown}"));
            runs.push(GenerationRun { round, input: (*name).to_owned(), measurement, error });
            // A signal ends the run between two turns.
            tokio::task::yield_now().await;
        }
    }
}

fn short(measured: &GenerationMeasurement) -> String {
    let metrics = metrics(measured);
    let cpu = |name: &str| metrics.get(&format!("{name}_cpu_us")).copied().unwrap_or_default();
    format!("CPU parse {:.0}, index {:.0}, compile {:.0} µs", cpu("parse"), cpu("index"), cpu("compile"))
}

impl GenerationResult {
    /// Returns true if all turns were taken and none failed. Prints a message if not.
    pub(in crate::scenario) fn is_complete(&self) -> bool {
        let report = &self.report;
        if report.interrupted {
            stdio::print_error(format_args!("interrupted after {} turns", report.runs.len()));
        }
        let mut failed = report.runs.iter().filter(|run| run.error.is_some());
        !report.interrupted && failed.next().is_none()
    }

    /// Returns the conditions that the result does not meet.
    pub(in crate::scenario) fn violations(&self) -> &[String] {
        &self.violations
    }

    /// Returns whether a signal ended the run.
    pub(in crate::scenario) fn is_interrupted(&self) -> bool {
        self.report.interrupted
    }
}

/// Returns a message for each median above its limit.
pub(super) fn violations(scenario: &GenerationScenario, report: &GenerationReport) -> Vec<String> {
    let beyond = |limit: &GenerationLimit| {
        let row = report.summary.iter().find(|row| row.input == limit.input)?;
        let median = row.metrics.get(&limit.metric)?.median;
        let GenerationLimit { metric, input, at_most } = limit;
        (median > *at_most)
            .then(|| format!("{metric} is {median:.1} for input {input}; at most {at_most} is accepted"))
    };
    scenario.acceptance.limits.iter().filter_map(beyond).collect()
}
