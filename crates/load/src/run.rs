//! A run: threads, progress, the end, and the result.

use std::{
    fs,
    io::IsTerminal as _,
    ops::Range,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, anyhow};
use chrono::DateTime;
use skysail_core::{shutdown, stdio};

use crate::{
    args::LoadArgs,
    clock,
    engine::{self, Requests},
    result::{RunFacts, RunResult},
    streams,
    tally::Tally,
    target::{Protocol, Target},
    text,
    worker::{FOR_PERCENTILES, Shared, nanoseconds},
};

/// Time between two progress lines on a terminal, and elsewhere.
const PROGRESS: Duration = Duration::from_secs(1);
const PROGRESS_IN_LOG: Duration = Duration::from_secs(10);

/// Runs a load and prints its result. Returns true if every request succeeded.
pub(crate) fn run(args: &LoadArgs) -> anyhow::Result<bool> {
    args.check()?;
    let url = args.url.as_deref().context("no URL is given")?;
    let target = Target::of(args, url)?;
    let mut result = measure(args, &target, &shared(args, FOR_PERCENTILES)?)?;
    publish(args, &mut result)?;
    Ok(result.errors_duration_histogram.count == 0 && result.unsent == 0)
}

/// Creates the shared state of a run, with which a caller can follow and end it. `digits` is the precision of the
/// results so far.
pub(crate) fn shared(args: &LoadArgs, digits: u8) -> anyhow::Result<Arc<Shared>> {
    Shared::new(threads(args), args.abort_on, digits)
}

/// Runs a load.
pub(crate) fn measure(args: &LoadArgs, target: &Target, shared: &Arc<Shared>) -> anyhow::Result<RunResult> {
    let threads = threads(args);
    let requests = Requests::to(target, args)?;
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX);
    let started = DateTime::from_timestamp(seconds, since_1970.subsec_nanos()).unwrap_or_default();
    let (tally, duration) = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let requests = &requests;
                let indices = share(args.connections, threads, thread);
                scope.spawn(move || match target.protocol {
                    Protocol::Http1 | Protocol::Tcp => {
                        engine::run(args, target, requests, shared, indices, None)
                    }
                    Protocol::Http2 | Protocol::Grpc => streams::run(args, target, shared, indices, None),
                })
            })
            .collect();
        let start = shared.wait_ready();
        let watched = follow(args, shared, || workers.iter().all(thread::ScopedJoinHandle::is_finished));
        if watched.is_err() {
            shared.stop();
        }
        let mut all = Tally::new()?;
        for worker in workers {
            all.add(worker.join().map_err(|_| anyhow!("a thread of the generator panicked"))??)?;
        }
        watched?;
        let ended = if shared.is_stopped() { clock::now() } else { all.ended };
        anyhow::Ok((all, ended.saturating_sub(start)))
    })?;
    // The last response may arrive before the end of the requested duration.
    let requested = args.duration().filter(|_| !shared.is_stopped()).map_or(0, nanoseconds);
    let duration = duration.max(requested);
    let facts = RunFacts { started, duration, threads, interrupted: shared.is_stopped() };
    Ok(RunResult::of(args, target, &tally, facts))
}

/// Returns the number of threads.
fn threads(args: &LoadArgs) -> usize {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    args.threads.map_or(cpus, |threads| threads as usize).min(args.connections as usize)
}

/// Returns the connections of a thread.
fn share(connections: u32, threads: usize, thread: usize) -> Range<u64> {
    let at = |thread: usize| u64::from(connections) * thread as u64 / threads as u64;
    at(thread)..at(thread + 1)
}

/// Prints progress until the workers have ended. A signal ends the load.
fn follow(args: &LoadArgs, shared: &Arc<Shared>, is_done: impl Fn() -> bool) -> anyhow::Result<()> {
    /// Time between two checks of the workers.
    const LOOK: Duration = Duration::from_millis(20);
    let every = if std::io::stderr().is_terminal() { PROGRESS } else { PROGRESS_IN_LOG };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let signal = shutdown::terminate();
        tokio::pin!(signal);
        let (began, mut last) = (Instant::now(), Instant::now());
        while !is_done() {
            tokio::select! {
                ended = &mut signal, if !shared.is_stopped() => {
                    ended?;
                    shared.stop();
                }
                () = tokio::time::sleep(LOOK) => {}
            }
            if last.elapsed() >= every && !args.quiet {
                stdio::print_error(progress(args, shared, began.elapsed(), last.elapsed()));
                last = Instant::now();
            }
        }
        anyhow::Ok(())
    })
}

fn progress(args: &LoadArgs, shared: &Shared, elapsed: Duration, since: Duration) -> String {
    let interval = shared.take_interval();
    let rate = interval.latency.len() as f64 / since.as_secs_f64();
    let at = |quantile: f64| text::time(interval.latency.value_at_quantile(quantile) as f64 / 1e9);
    let of = args.duration().map_or_else(String::new, |all| format!(" of {:.0}", all.as_secs_f64()));
    format!(
        "{:.0}{of} s: {}/s, P50 {}, P99 {}, {} failed",
        elapsed.as_secs_f64(),
        text::number(rate.round() as u64),
        at(0.5),
        at(0.99),
        text::number(interval.failed)
    )
}

/// Prints the result and writes its files.
fn publish(args: &LoadArgs, result: &mut RunResult) -> anyhow::Result<()> {
    let saved = args.autosave.then(|| result.save(&args.data_dir));
    let json = serde_json::to_string_pretty(result)?;
    match args.json.as_deref() {
        Some(file) if file == Path::new("-") => stdio::print(&json)?,
        file => {
            stdio::print(text::of(result))?;
            if let Some(file) = file {
                fs::write(file, format!("{json}\n"))
                    .with_context(|| format!("cannot write {}", file.display()))?;
            }
        }
    }
    if let Some(saved) = saved {
        stdio::print_error(format_args!("the result is in {}", saved?.display()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_all_connections() {
        for (connections, threads) in [(1, 1), (7, 2), (64, 3), (100, 100)] {
            let all: Vec<u64> = (0..threads).flat_map(|thread| share(connections, threads, thread)).collect();
            assert_eq!(all, (0..u64::from(connections)).collect::<Vec<_>>());
        }
    }
}
