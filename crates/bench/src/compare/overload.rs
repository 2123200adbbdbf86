//! The experiment `overload`: the maximum throughput of a sidecar, then twice that, then half of it.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use super::experiments::PAYLOAD;
use crate::{
    load::{
        self, Load, Traffic,
        surge::{self, Account, End, RequestRecord, Surge},
    },
    peers::Peer,
    topology::{RunningTopology, Setup, Shape},
};

/// Result of a surge.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Overload {
    /// Requests per second at maximum throughput.
    pub(crate) capacity: f64,
    /// Requests due in the surge, per second: their number and their outcomes.
    pub(crate) offered: f64,
    pub(crate) answered: f64,
    pub(crate) refused: f64,
    pub(crate) failed: f64,
    /// P99 before the surge in µs, from the due time of requests. The following figures also count from the
    /// due time, except those with `served`.
    pub(crate) calm_p99_us: f64,
    /// Latency of the surge's responses with status 200.
    pub(crate) answered_p50_us: f64,
    pub(crate) answered_p99_us: f64,
    /// Like `answered`, from the time a request had a connection: the latency without the wait for one.
    pub(crate) served_p50_us: f64,
    pub(crate) served_p99_us: f64,
    /// Latency of the surge's responses with any status.
    pub(crate) any_p50_us: f64,
    pub(crate) any_p99_us: f64,
    /// Time after the surge until P99 returns to its former value and stays there. Null if it does not within the
    /// measured time, and if `disturbed`.
    pub(crate) recovery_ms: Option<f64>,
    /// The calm phase was disturbed by other work of the machine, so the normal latency is not known.
    pub(crate) disturbed: bool,
    /// Connections that the client opened.
    pub(crate) connections: usize,
    /// Resident memory before the surge, and its peak.
    pub(crate) rss_before_kb: u64,
    pub(crate) rss_most_kb: u64,
}

impl Overload {
    /// Returns the number of requests of which a percentile is, in phases of this length.
    pub(super) fn samples(&self, metric: &str, seconds: f64) -> u64 {
        let rate = match metric.split('_').next() {
            // Half of the maximum throughput, in the second half of the phase.
            Some("calm") => self.capacity / 4.0,
            Some("any") => self.answered + self.refused,
            _ => self.answered,
        };
        (rate * seconds) as u64
    }
}

/// Number of connections that measure the maximum throughput.
const FLAT_OUT: usize = 32;
/// Resolution of the recovery time.
const STEP: Duration = Duration::from_millis(100);
/// Number of good steps in a row that count as a recovery. On a shared machine there are bad steps without a surge as
/// well.
const GOOD_STEPS: usize = 5;
/// P99 in µs above which the calm phase counts as disturbed.
const DISTURBED_P99: f64 = 10_000.0;
/// Interval of memory measurements.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// Takes the turn. Each of the three phases takes `seconds`.
pub(super) async fn take(
    setup: &Setup,
    shape: Shape,
    peer: Option<(Peer, &Path)>,
    warmup: Duration,
    seconds: Duration,
) -> anyhow::Result<Overload> {
    let standing = RunningTopology::start(setup, &shape, peer).await?;
    let measured = measure(&standing, shape.connections, warmup, seconds).await;
    standing.end(measured).await
}

async fn measure(
    standing: &RunningTopology,
    connections: usize,
    warmup: Duration,
    seconds: Duration,
) -> anyhow::Result<Overload> {
    let load = Load {
        target: standing.entry,
        traffic: Traffic::Http1,
        connections: FLAT_OUT,
        schedule: None,
        payload: PAYLOAD,
        warmup,
        window: seconds,
        tls: None,
    };
    let outcome = standing.client(move || load::drive(&load, |_| ())).await?;
    let capacity = outcome.answered_in_window as f64 / seconds.as_secs_f64();
    if capacity < 100.0 {
        bail!("the sidecar answers only {capacity:.0} requests per second");
    }
    let half = (capacity / 2.0) as u32;
    let phases = [half, 4 * half, half].map(|rate| (rate, seconds));
    let surge = Surge { target: standing.entry, payload: PAYLOAD, connections, phases };
    let before = standing.resident();
    let mut max = before;
    let driving = standing.client(move || surge::drive(&surge));
    tokio::pin!(driving);
    let account = loop {
        tokio::select! {
            account = &mut driving => break account?,
            () = tokio::time::sleep(SAMPLE_INTERVAL) => max = max.max(standing.resident()),
        }
    };
    let mut overload = summarize(&account, seconds).context("there were no responses")?;
    (overload.capacity, overload.rss_before_kb, overload.rss_most_kb) = (capacity, before, max);
    Ok(overload)
}

fn summarize(account: &Account, seconds: Duration) -> Option<Overload> {
    let phase = u64::try_from(seconds.as_micros()).ok()?;
    let due =
        |from: u64, to: u64| account.requests.iter().filter(move |request| (from..to).contains(&request.due));
    // The first half of the calm phase warms up.
    let calm = quantiles(due(phase / 2, phase).filter(|request| request.end == End::Answered))?;
    let surge: Vec<RequestRecord> = due(phase, 2 * phase).copied().collect();
    let rate = |end: Option<End>| {
        surge.iter().filter(|request| end.is_none_or(|end| request.end == end)).count() as f64
            / seconds.as_secs_f64()
    };
    let answered = quantiles(surge.iter().filter(|request| request.end == End::Answered))?;
    let served = surge.iter().filter(|request| request.end == End::Answered).map(|request| request.served);
    let served = quantiles_of(served.collect())?;
    let any = quantiles(surge.iter().filter(|request| request.end != End::Failed))?;
    // Allows for random deviation.
    let normal = (2.0 * calm.1).max(calm.1 + 2_000.0);
    let step = u64::try_from(STEP.as_micros()).ok()?;
    let steps = phase / step;
    let good = |number: u64| {
        let from = 2 * phase + number * step;
        let all_answered = due(from, from + step).all(|request| request.end == End::Answered);
        all_answered && quantiles(due(from, from + step)).is_none_or(|(_, p99)| p99 <= normal)
    };
    let disturbed = calm.1 > DISTURBED_P99;
    let good: Vec<bool> = (0..steps).map(good).collect();
    let recovery = good.windows(GOOD_STEPS).position(|steps| steps.iter().all(|good| *good));
    Some(Overload {
        capacity: 0.0,
        offered: rate(None),
        answered: rate(Some(End::Answered)),
        refused: rate(Some(End::Refused)),
        failed: rate(Some(End::Failed)),
        calm_p99_us: calm.1,
        answered_p50_us: answered.0,
        answered_p99_us: answered.1,
        served_p50_us: served.0,
        served_p99_us: served.1,
        any_p50_us: any.0,
        any_p99_us: any.1,
        recovery_ms: recovery.filter(|_| !disturbed).map(|steps| (steps as u64 * step) as f64 / 1e3),
        disturbed,
        connections: account.connections,
        rss_before_kb: 0,
        rss_most_kb: 0,
    })
}

/// Returns P50 and P99 of the latencies; `None` without requests.
fn quantiles<'a>(requests: impl Iterator<Item = &'a RequestRecord>) -> Option<(f64, f64)> {
    quantiles_of(requests.map(|request| request.took).collect())
}

fn quantiles_of(mut took: Vec<u64>) -> Option<(f64, f64)> {
    took.sort_unstable();
    let at = |percent: usize| took.get((took.len() * percent / 100).min(took.len().checked_sub(1)?)).copied();
    Some((at(50)? as f64, at(99)? as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Phases of one second each with 1,000, 2,000 and 1,000 requests per second. In the surge, one half is refused
    /// after 1 ms, the other answered after 50 ms. For 300 ms after it, responses still take 40 ms.
    fn account() -> Account {
        let mut requests = Vec::new();
        for number in 0..1_000_u64 {
            requests.push(RequestRecord { due: number * 1_000, took: 500, served: 500, end: End::Answered });
            let due = 1_000_000 + number * 1_000;
            requests.push(RequestRecord { due, took: 50_000, served: 5_000, end: End::Answered });
            requests.push(RequestRecord { due: due + 500, took: 1_000, served: 900, end: End::Refused });
            let took = if number < 300 { 40_000 } else { 500 };
            requests.push(RequestRecord {
                due: 2_000_000 + number * 1_000,
                took,
                served: 400,
                end: End::Answered,
            });
        }
        Account { requests, connections: 7 }
    }

    #[test]
    fn surge_latency_counts_from_the_due_time() {
        let overload = summarize(&account(), Duration::from_secs(1)).unwrap();
        assert_eq!(
            (overload.offered, overload.answered, overload.refused, overload.failed),
            (2_000.0, 1_000.0, 1_000.0, 0.0)
        );
        assert_eq!(
            (overload.calm_p99_us, overload.answered_p50_us, overload.answered_p99_us),
            (500.0, 50_000.0, 50_000.0)
        );
        assert_eq!((overload.served_p50_us, overload.served_p99_us), (5_000.0, 5_000.0));
        assert_eq!((overload.any_p50_us, overload.any_p99_us), (50_000.0, 50_000.0));
        assert_eq!((overload.recovery_ms, overload.connections), (Some(300.0), 7));
    }

    #[test]
    fn recovery_needs_several_good_steps() {
        let failing = |dues: &[u64]| {
            let mut account = account();
            let failed = |due: &u64| RequestRecord { due: *due, took: 1, served: 0, end: End::Failed };
            account.requests.extend(dues.iter().map(failed));
            summarize(&account, Duration::from_secs(1)).unwrap().recovery_ms
        };
        assert_eq!(failing(&[2_999_000]), Some(300.0));
        assert_eq!(failing(&[2_310_000]), Some(400.0));
        assert_eq!(failing(&[2_600_000]), None);
        assert_eq!(summarize(&Account::default(), Duration::from_secs(1)), None);
    }

    #[test]
    fn recovery_is_unknown_without_a_calm_phase() {
        let mut account = account();
        account
            .requests
            .iter_mut()
            .filter(|request| request.due < 1_000_000)
            .for_each(|request| request.took = 10_001);
        let overload = summarize(&account, Duration::from_secs(1)).unwrap();
        assert_eq!((overload.recovery_ms, overload.disturbed), (None, true));
    }
}
