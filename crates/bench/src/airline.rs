//! The airline example under the load of user sessions, and the search for its maximum throughput.
//!
//! [`measure`] starts the five services with their databases in a variant of the mesh ([`objects`]), loads the databases,
//! and sends the transaction mix of Acme Air from a pod without a sidecar: at a fixed rate, with a fixed number of users,
//! and then at the rates of a search by bisection.

mod objects;
mod postgres;

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

pub(crate) use self::objects::AirlineVariant;
use self::{
    objects::{AirlineObjects, CLIENT},
    postgres::PostgresServer,
};
use crate::{
    accounting::{self, Cpu},
    mesh::{self, MeshPart, MeshPrograms, ReadyMesh},
};

/// Rates of the search, as shares of the throughput of the users.
const LEAST: f64 = 0.4;
const MOST: f64 = 1.1;
/// Maximum number of steps that lower the rate before the search begins.
const MAX_LOWER: u32 = 4;
/// Maximum growth of the number of active sessions, as a share of those that start, or as a number.
const GROWTH: (f64, f64) = (0.1, 3.0);
/// Minimum number of calls of a load, which a slow machine answers later than the window ends.
const LEAST_CALLS: &str = "60";

/// Databases of the services.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AirlineDatabase {
    /// One in each process.
    #[default]
    Embedded,
    /// A table of a PostgreSQL server for each service. The server is started outside of the mesh.
    Postgresql,
}

/// Load of the travellers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AirlineLoad {
    /// Calls per second at which latency and CPU time are measured.
    pub(crate) rate: u32,
    /// Travellers without pauses, for the throughput without a latency limit.
    pub(crate) users: u32,
    /// Customers in the database.
    pub(crate) loaded: u32,
    /// Customers that travel, each in at most one session at a time.
    pub(crate) customers: u32,
    /// Mean pause between two calls of a session, in milliseconds. The users have none.
    pub(crate) pause_ms: u32,
    /// Maximum P99 of calls in milliseconds.
    pub(crate) limit_ms: f64,
    /// Number of halvings of the range of rates.
    pub(crate) steps: u32,
}

/// Result of a turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AirlineMeasurement {
    /// Sidecars and gateways.
    pub(crate) sidecars: u64,
    /// Seconds from the start of the mesh until all pods are ready.
    pub(crate) ready_seconds: f64,
    /// At the fixed rate.
    pub(crate) at_rate: AirlineTrial,
    /// With the users.
    pub(crate) of_users: AirlineTrial,
    /// At the greatest rate within the latency limit.
    pub(crate) within_limit: AirlineTrial,
    /// Rates of the search, in order, and whether they were within the limit.
    pub(crate) searched: Vec<(f64, bool)>,
    /// Cost at the fixed rate.
    pub(crate) parts: BTreeMap<MeshPart, AirlineCost>,
}

/// Result of a load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AirlineTrial {
    /// Calls per second that had a response in the measured time.
    pub(crate) calls_per_second: f64,
    pub(crate) calls: u64,
    /// Calls with an unexpected status or without a response.
    pub(crate) failed: u64,
    /// Sessions that started in the measured time, those that ended, and those that were due while all customers travelled.
    pub(crate) started: u64,
    pub(crate) finished: u64,
    pub(crate) skipped: u64,
    /// Latency of calls in microseconds, by percentile.
    pub(crate) latency_us: BTreeMap<String, f64>,
    /// Calls by name.
    pub(crate) by_name: BTreeMap<String, u64>,
}

/// Cost of a part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AirlineCost {
    /// CPU time in microseconds for a call.
    pub(crate) cpu_us_per_call: f64,
    /// CPU time in microseconds per second.
    pub(crate) cpu_us_per_second: f64,
    /// Resident memory in kilobytes.
    pub(crate) rss_kb: u64,
}

/// Starts a variant of the mesh, measures it, and ends it.
///
/// # Errors
/// The mesh does not become ready, the load does not run, or no rate is within the latency limit.
pub(crate) async fn measure(
    (variant, database): (AirlineVariant, AirlineDatabase),
    programs: &MeshPrograms,
    load: &AirlineLoad,
    (warmup, window): (Duration, Duration),
) -> anyhow::Result<AirlineMeasurement> {
    let server = match database {
        AirlineDatabase::Embedded => None,
        AirlineDatabase::Postgresql => Some(PostgresServer::start().await?),
    };
    let objects = AirlineObjects::new(variant, server.as_ref().map(PostgresServer::url).as_deref())?;
    let mesh = (&*objects.yaml, &*objects.with_sidecars);
    let measured = mesh::run(mesh, programs, window, async |mesh| {
        let driver = AirlineDriver { mesh, objects: &objects, load, times: (warmup, window) };
        driver.measure(server.as_ref()).await
    });
    let measured = measured.await;
    if let Some(server) = server {
        server.stop().await;
    }
    measured
}

/// The load in a pod of a mesh that is ready.
struct AirlineDriver<'a> {
    mesh: &'a ReadyMesh<'a>,
    objects: &'a AirlineObjects,
    load: &'a AirlineLoad,
    times: (Duration, Duration),
}

impl AirlineDriver<'_> {
    async fn measure(&self, server: Option<&PostgresServer>) -> anyhow::Result<AirlineMeasurement> {
        let AirlineLoad { rate, users, .. } = *self.load;
        let rate = f64::from(rate);
        // Loads the databases, opens all connections, and lets the sidecars learn their routes.
        let loaded = self.load.loaded.to_string();
        self.send(&["--rate", &rate.to_string(), "--load-databases", &loaded], self.load.pause_ms).await?;
        let sidecars = self.objects.with_sidecars.len() as u64;
        let mut parts = self.mesh.parts(sidecars)?;
        if let Some(server) = server {
            parts.insert(MeshPart::Database, server.processes());
        }
        let cpu = || parts.iter().map(|(part, pids)| Ok((*part, accounting::cpu(pids)?)));
        let before: BTreeMap<MeshPart, Cpu> = cpu().collect::<anyhow::Result<_>>()?;
        let began = std::time::Instant::now();
        let (at_rate, all_calls) = self.send(&["--rate", &rate.to_string()], self.load.pause_ms).await?;
        let seconds = began.elapsed().as_secs_f64();
        let after: BTreeMap<MeshPart, Cpu> = cpu().collect::<anyhow::Result<_>>()?;
        let (of_users, _) = self.send(&["--users", &users.to_string()], 0).await?;
        let (within_limit, searched) = self.search(of_users.calls_per_second).await?;
        let cost = |(part, pids): (&MeshPart, &Vec<i32>)| {
            let used = |before: &Cpu| after.get(part).map_or(0, |after| after.since(*before).nanoseconds);
            let cpu_us = before.get(part).map_or(0, used) as f64 / 1e3;
            let cost = AirlineCost {
                cpu_us_per_call: cpu_us / all_calls as f64,
                cpu_us_per_second: cpu_us / seconds,
                rss_kb: accounting::memory(pids).rss_kb,
            };
            (*part, cost)
        };
        Ok(AirlineMeasurement {
            sidecars,
            ready_seconds: self.mesh.seconds,
            at_rate,
            of_users,
            within_limit,
            searched,
            parts: parts.iter().map(cost).collect(),
        })
    }

    /// Returns the trial at the greatest rate within the latency limit, and all rates. The first rates are below the
    /// throughput of the users; each further one is the geometric mean of the greatest that was within the limit and the
    /// least that was not.
    async fn search(&self, of_users: f64) -> anyhow::Result<(AirlineTrial, Vec<(f64, bool)>)> {
        let (mut low, mut high) = (of_users * LEAST, of_users * MOST);
        let (mut best, mut searched) = (None, Vec::new());
        let mut lower = 0;
        for _ in 0..self.load.steps + MAX_LOWER {
            if searched.len() as u32 >= self.load.steps + lower {
                break;
            }
            let rate = (low * high).sqrt();
            let (trial, _) = self.send(&["--rate", &format!("{rate:.1}")], self.load.pause_ms).await?;
            let is_within = trial.is_within(self.load.limit_ms);
            searched.push((rate, is_within));
            if is_within {
                low = rate;
                best = Some(trial);
            } else {
                high = rate;
                if best.is_none() && lower < MAX_LOWER {
                    low /= 2.0;
                    lower += 1;
                }
            }
        }
        let best = best.with_context(|| {
            format!(
                "no rate was within the limit, a P99 of {} ms and no failed call: {searched:.0?} calls/s",
                self.load.limit_ms
            )
        })?;
        Ok((best, searched))
    }

    /// Sends calls for the time of the warm-up and of the window. Returns the result of the window, and the number of
    /// calls in both.
    async fn send(&self, amount: &[&str], pause_ms: u32) -> anyhow::Result<(AirlineTrial, u64)> {
        let (warmup, window) = self.times;
        let mut command = self.mesh.command(CLIENT, &["workload", "airline", "load"]);
        command.args(amount).args(["--least-calls", LEAST_CALLS]);
        for (option, value) in [
            ("--pause-ms", pause_ms.to_string()),
            ("--customers", self.load.customers.to_string()),
            ("--warmup", warmup.as_secs_f64().to_string()),
            ("--seconds", window.as_secs_f64().to_string()),
            // The mesh's routing and refusals are not part of the load.
            ("--canary-share", "0".to_owned()),
            ("--forbidden-share", "0".to_owned()),
        ] {
            command.args([option, &value]);
        }
        for service in ["auth", "customer", "flight", "booking"] {
            command.arg(format!("--{service}-url")).arg(self.objects.url(service));
        }
        let output = command.output().await?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the load did not run: {}", errors.trim());
        AirlineTrial::parse(&String::from_utf8_lossy(&output.stdout))
    }
}

impl AirlineTrial {
    /// Returns true if no call failed, the P99 is within the limit, and the number of active sessions did not grow.
    fn is_within(&self, limit_ms: f64) -> bool {
        let p99 = self.latency_us.get("p99").copied().unwrap_or(f64::INFINITY);
        let growth = self.started as f64 - self.finished as f64;
        self.failed + self.skipped == 0
            && p99 <= limit_ms * 1e3
            && growth <= (GROWTH.0 * self.started as f64).max(GROWTH.1)
    }

    /// Reads the result of `skysail workload airline load`. Returns also the number of all calls.
    fn parse(text: &str) -> anyhow::Result<(Self, u64)> {
        let line = text.lines().last().context("the load has no result")?;
        let result: serde_json::Value = serde_json::from_str(line)?;
        let number = |name: &str| result[name].as_u64().with_context(|| format!("the load has no {name}"));
        let seconds = result["seconds"].as_f64().context("the load has no seconds")?;
        let calls = number("calls")?;
        let sessions = |name: &str| result["sessions"][name].as_u64().unwrap_or_default();
        let latency = result["latency_us"].as_object().into_iter().flatten();
        let latency_us = latency.filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect();
        let by_name = result["by_name"].as_object().into_iter().flatten();
        let by_name = by_name.filter_map(|(name, of)| Some((name.clone(), of["total"].as_u64()?))).collect();
        let trial = Self {
            calls_per_second: calls as f64 / seconds,
            calls,
            failed: calls - number("as_expected")?.min(calls) + number("unanswered")?,
            started: sessions("started"),
            finished: sessions("finished"),
            skipped: sessions("skipped"),
            latency_us,
            by_name,
        };
        Ok((trial, number("all_calls")?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_of_the_load_is_read() {
        let text = r#"{"seconds": 2.0, "calls": 100, "as_expected": 97, "unanswered": 1, "all_calls": 150,
            "sessions": {"started": 5, "finished": 4, "skipped": 2}, "latency_us": {"p50": 900, "p99": 2000},
            "by_name": {"login": {"total": 3}}}"#;
        let (trial, all_calls) = AirlineTrial::parse(&text.replace('\n', " ")).unwrap();
        assert_eq!((trial.calls_per_second, trial.failed, trial.skipped, all_calls), (50.0, 4, 2, 150));
        assert_eq!((trial.latency_us["p99"], trial.by_name["login"]), (2_000.0, 3));
        assert!(AirlineTrial::parse("").is_err());
    }

    #[test]
    fn a_rate_is_within_the_limit_if_sessions_do_not_pile_up() {
        let trial = |p99_us: f64, failed: u64, finished: u64| AirlineTrial {
            calls_per_second: 4_350.0,
            calls: 8_700,
            failed,
            started: 200,
            finished,
            skipped: 0,
            latency_us: BTreeMap::from([("p99".to_owned(), p99_us)]),
            by_name: BTreeMap::new(),
        };
        assert!(trial(50_000.0, 0, 180).is_within(50.0));
        for beyond in [trial(50_001.0, 0, 200), trial(1_000.0, 1, 200), trial(1_000.0, 0, 179)] {
            assert!(!beyond.is_within(50.0), "{beyond:?}");
        }
    }
}
