//! Measurement of changes while sidecars are connected.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use skysail_core::stdio;

use super::{
    AFTER_EFFECTS, ControlArgs, Fleet, Mesh, SETTLE, Server, TIMEOUT,
    mesh::Change,
    report::{ChangeResult, Churn, Quantiles},
};
use crate::clock;

/// Pause between changes while sidecars disconnect and reconnect.
const BETWEEN_CHANGES: Duration = Duration::from_millis(100);
/// Interval for which a control plane that reports a change early must be idle afterwards, and the CPU time in nanoseconds
/// that counts as idle.
const IDLE_INTERVAL: Duration = Duration::from_millis(500);
const IDLE_CPU: u64 = 25_000_000;

/// Makes a change `repeat` times, and measures its cost.
pub(super) fn measure_change(
    fleet: &mut Fleet<'_>,
    server: &mut Server,
    mesh: &mut Mesh,
    change: Change,
    repeat: u32,
) -> anyhow::Result<ChangeResult> {
    let published = server.publications();
    if mesh.begin(change)? {
        settle(fleet, server, published)?;
        fleet.rest(SETTLE)?;
    }
    let (mut moments, mut lasts, mut cpu, mut bytes, mut sidecars) =
        (Vec::new(), Vec::new(), Vec::new(), 0, 0);
    let mut reached = Vec::new();
    for _ in 0..repeat {
        sidecars = fleet.begin_wait(change.kind(fleet.plan), |plan, sidecar| change.concerns(plan, sidecar));
        let published = server.publications();
        let before = server.cpu()?;
        let began = clock::now();
        mesh.change(change)?;
        let arrived = fleet
            .wait(sidecars, TIMEOUT)
            .with_context(|| format!("{}: {}", change.name(), server.running.output_tail()));
        // A change that was not written does not arrive.
        mesh.finish()?;
        arrived?;
        settle(fleet, server, published)?;
        cpu.push(server.cpu()? - before);
        let took: Vec<u64> = fleet.received.changed.iter().map(|at| at - began).collect();
        lasts.extend(took.iter().max());
        moments.extend(took);
        bytes += fleet.received.bytes;
        reached.push(fleet.received.reached());
    }
    // Changes come in pairs: the second of a pair removes the object that the first has added.
    if repeat % 2 == 1 {
        let published = server.publications();
        mesh.change(change)?;
        settle(fleet, server, published)?;
    }
    let published = server.publications();
    if mesh.end(change)? {
        settle(fleet, server, published)?;
        // Proxies may receive their whole configuration again.
        fleet.rest(SETTLE)?;
    }
    cpu.sort_unstable();
    reached.sort_unstable();
    let reached_in_all = reached.iter().sum::<usize>().max(1);
    let result = ChangeResult {
        change,
        sidecars,
        reached: reached[reached.len() / 2],
        ms: Quantiles::of(moments),
        last_ms: Quantiles::of(lasts).p50,
        cpu_ms: cpu[cpu.len() / 2] as f64 / 1e6,
        bytes_each: bytes as f64 / reached_in_all as f64,
    };
    stdio::print_error(format_args!(
        "{}: received by the last of {} sidecars after {:.1} ms, {:.1} ms of CPU, {} sidecars got a response",
        change.name(),
        result.sidecars,
        result.last_ms,
        result.cpu_ms,
        result.reached
    ));
    Ok(result)
}

/// Waits until a change is published and validated, and then [`AFTER_EFFECTS`] for acknowledgements and the responses
/// to them. `published` is the number of publications before the change.
fn settle(fleet: &mut Fleet<'_>, server: &Server, published: usize) -> anyhow::Result<()> {
    fleet
        .wait_until(|| server.publications() > published, TIMEOUT)
        .with_context(|| format!("the change is not published: {}", server.running.output_tail()))?;
    fleet.rest(AFTER_EFFECTS)?;
    let began = Instant::now();
    while server.reports_early() && began.elapsed() < TIMEOUT {
        let before = server.cpu()?;
        fleet.rest(IDLE_INTERVAL)?;
        if server.cpu()? - before < IDLE_CPU {
            break;
        }
    }
    Ok(())
}

/// Disconnects and reconnects sidecars while the configuration changes.
pub(super) fn churn(
    fleet: &mut Fleet<'_>,
    server: &mut Server,
    mesh: &mut Mesh,
    args: &ControlArgs,
) -> anyhow::Result<Churn> {
    fleet.received = Default::default();
    let (cpu, start) = (server.cpu()?, Instant::now());
    let (mut changes, mut resident_mb) = (0, Vec::new());
    let meanwhile = || {
        let passed = start.elapsed();
        if passed >= BETWEEN_CHANGES * (changes as u32 + 1) {
            mesh.change(if changes % 2 == 0 { Change::Endpoint } else { Change::Route })?;
            changes += 1;
        }
        if passed >= args.seconds / 10 * (resident_mb.len() as u32 + 1) {
            resident_mb.push(server.resident());
        }
        Ok(())
    };
    let share = f64::from(args.churn) / 100.0;
    let back = fleet.churn(share, args.seconds, args.at_once as usize, meanwhile)?;
    let seconds = start.elapsed().as_secs_f64();
    resident_mb.push(server.resident());
    let received = std::mem::take(&mut fleet.received);
    let made = received.configured.len() as f64;
    Ok(Churn {
        percent: args.churn,
        seconds,
        per_second: back as f64 / args.seconds.as_secs_f64(),
        cpu_ms_each: (server.cpu()? - cpu) as f64 / 1e6 / made,
        ms: Quantiles::of(received.configured),
        changes,
        resident_mb,
    })
}
