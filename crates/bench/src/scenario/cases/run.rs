//! Takes the turns of a study.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use skysail_core::{shutdown, stdio};

use super::{
    CaseStudy,
    result::{CaseReport, CaseResult, CaseRun, CaseSettings},
};
use crate::{
    foreign_load::{Attempt, Repeats},
    network::NotAvailable,
    peers::Peer,
    report::Machine,
    scenario::format::SizeName,
    stage::{self, minutes},
};

/// Takes all turns. A signal ends them early. `measure` gets the case, the duration of the warm-up and that of the
/// measurement. A turn for which its error is [`NotAvailable`] has not failed.
///
/// # Errors
/// The runtime cannot be created.
pub(in crate::scenario) fn run<S: CaseStudy>(
    scenario: S,
    size: SizeName,
    settings: CaseSettings<S::Case>,
    (machine, peers): (Machine, &[(Peer, PathBuf)]),
    measure: impl AsyncFn(&S::Case, Duration, Duration) -> anyhow::Result<S::Measurement>,
) -> anyhow::Result<CaseResult<S>> {
    run_groups(
        scenario,
        size,
        settings,
        (machine, peers),
        |_, _| false,
        async |cases, warmup, window| {
            let mut all = Vec::with_capacity(cases.len());
            for case in cases {
                all.push(measure(case, warmup, window).await?);
            }
            Ok(all)
        },
    )
}

/// Takes all turns like [`run`]. Consecutive cases for which `is_group` returns true are measured in one turn: `measure`
/// gets them all, and returns a result for each.
///
/// # Errors
/// As for [`run`].
pub(in crate::scenario) fn run_groups<S: CaseStudy>(
    scenario: S,
    size: SizeName,
    settings: CaseSettings<S::Case>,
    (machine, peers): (Machine, &[(Peer, PathBuf)]),
    is_group: impl Fn(&S::Case, &S::Case) -> bool,
    measure: impl AsyncFn(&[S::Case], Duration, Duration) -> anyhow::Result<Vec<S::Measurement>>,
) -> anyhow::Result<CaseResult<S>> {
    let (started, mut runs, mut repeated) = (stage::now(), Vec::new(), Vec::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let interrupted = runtime.block_on(async {
        tokio::select! {
            biased;
            signal = shutdown::terminate() => signal.map(|_| true),
            () = take::<S>(&settings, (&mut runs, &mut repeated), is_group, measure) => Ok(false),
        }
    })?;
    let report = CaseReport::new((started, interrupted), machine, settings, stage::versions(peers), runs);
    let report = CaseReport { repeated, ..report };
    Ok(CaseResult::new(scenario, size, report))
}

/// Turns of a study.
type CaseRuns<S> = Vec<CaseRun<<S as CaseStudy>::Measurement>>;

/// Takes a turn of each case in each round. Disturbances of the machine therefore affect all cases alike.
async fn take<S: CaseStudy>(
    settings: &CaseSettings<S::Case>,
    (runs, repeated): (&mut CaseRuns<S>, &mut CaseRuns<S>),
    is_group: impl Fn(&S::Case, &S::Case) -> bool,
    measure: impl AsyncFn(&[S::Case], Duration, Duration) -> anyhow::Result<Vec<S::Measurement>>,
) {
    let [warmup, window] = [settings.warmup, settings.seconds].map(Duration::from_secs_f64);
    let (began, all) = (Instant::now(), settings.cases.len() * settings.rounds as usize);
    let mut repeats = Repeats::new(settings.rounds);
    for round in 1..=settings.rounds {
        for cases in settings.cases.chunk_by(&is_group) {
            let taken = repeats.take(async || measure(cases, warmup, window).await).await;
            let names: Vec<&str> = cases.iter().map(S::name).collect();
            let (turns, note) = (runs.len() + cases.len(), taken.note());
            let left = minutes(began.elapsed().div_f64(turns as f64).mul_f64((all - turns) as f64));
            for run in case_runs(round, &names, taken.counts) {
                let (done, case) = (runs.len() + 1, &run.case);
                let shown = match (&run.measurement, &run.unavailable) {
                    (Some(measured), _) => S::progress(measured),
                    (None, Some(reason)) => format!("not available: {reason}"),
                    (None, None) => format!("failed: {}", run.error.as_deref().unwrap_or_default()),
                };
                stdio::print_error(format_args!(
                    "[{done}/{all}, {left} left] round {round}, {case}: {shown}{note}"
                ));
                runs.push(run);
            }
            repeated.extend(taken.dropped.into_iter().flat_map(|attempt| case_runs(round, &names, attempt)));
            // A signal ends the run between two turns that do not wait.
            tokio::task::yield_now().await;
        }
    }
}

/// Returns a turn of each case with what an attempt measured.
fn case_runs<M>(round: u32, names: &[&str], Attempt { result, busy }: Attempt<Vec<M>>) -> Vec<CaseRun<M>> {
    let (mut measured, mut error, mut unavailable) = (Vec::new(), None, None);
    match result {
        Ok(all) => measured = all,
        Err(lacking) if lacking.is::<NotAvailable>() => unavailable = Some(format!("{lacking:#}")),
        Err(failed) => error = Some(format!("{failed:#}")),
    }
    let mut measured = measured.into_iter();
    let run = |case: &&str| {
        let (case, error, unavailable) = ((*case).to_owned(), error.clone(), unavailable.clone());
        CaseRun { round, case, measurement: measured.next(), error, unavailable, busy }
    };
    names.iter().map(run).collect()
}
