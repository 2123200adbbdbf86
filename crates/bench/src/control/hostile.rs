//! `skysail bench control --hostile`: measures what one workload can make a control plane spend, attack by attack.
//!
//! Each attack has its own control plane and its own thread, while an honest sidecar waits for changes of endpoints.
//! [`attacks`] defines what each sends. [`raw`] is a connection that may violate the protocol.

mod attacks;
mod raw;

use std::{
    collections::HashSet,
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use serde::Serialize;
use skysail_core::stdio;

pub(crate) use self::attacks::Attack;
use self::raw::AttackEnvironment;
use super::{
    ControlArgs, Fleet, Form, Mesh, Plan, Quantiles, SETTLE, Server, ServerArgs, Source, Store, Subscription,
    TIMEOUT, learn, mesh::Change, message::Kind,
};
use crate::{certificates, clock, layout, report::Machine, stage, stream::Tls, tls};

/// Pause between two changes of an endpoint.
const BETWEEN_CHANGES: Duration = Duration::from_millis(250);
/// A service on another port.
const OTHER_PORT: &str = "\
apiVersion: v1
kind: Service
metadata: {name: other, namespace: ns-0}
spec: {clusterIP: 172.17.0.1, selector: {app: other}, ports: [{name: http, port: 81}]}
";
/// Pause after an attack before memory is measured, in which connections end and memory is freed.
const AFTER_EFFECTS: Duration = Duration::from_secs(3);

/// The result file; `docs/benchmarks.md` describes its format.
#[derive(Debug, Serialize)]
pub(super) struct HostileReport {
    format: u32,
    benchmark: &'static str,
    version: &'static str,
    /// Seconds since 1970.
    started: u64,
    machine: Machine,
    services: usize,
    connections: usize,
    /// Duration of each attack.
    seconds: f64,
    tls: bool,
    attacks: Vec<AttackResult>,
}

/// Result of an attack.
#[derive(Debug, Serialize)]
struct AttackResult {
    attack: Attack,
    /// Resident megabytes of the control plane before the attack, at the peak and after it.
    before_mb: f64,
    peak_mb: f64,
    after_mb: f64,
    /// CPU time of the control plane, in cores.
    cpus: f64,
    /// Bytes that the attacker sent and read.
    sent_mb: f64,
    read_mb: f64,
    /// Connections that the attacker opened, including reopened ones.
    connections: u64,
    /// Time from the change of an endpoint until the honest sidecar has it.
    honest_ms: Quantiles,
    /// Changes that did not reach the honest sidecar within [`TIMEOUT`].
    failed: Option<String>,
}

pub(super) async fn measure(
    args: &ControlArgs,
    folder: &Path,
    machine: Machine,
) -> anyhow::Result<HostileReport> {
    let started = stage::now();
    let mut outcomes = Vec::new();
    let all = Attack::all();
    let attacks: Vec<Attack> = if args.attacks.is_empty() { all } else { args.attacks.clone() };
    for attack in attacks {
        let folder = folder.join(attack.to_string());
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let outcome = one(args, &folder, attack).await.with_context(|| format!("{attack}"))?;
        stdio::print_error(format_args!(
            "{attack}: {:.0} MB, peak {:.0}, {:.2} cores, an endpoint change after {}",
            outcome.before_mb,
            outcome.peak_mb,
            outcome.cpus,
            outcome.honest_ms.text()
        ));
        outcomes.push(outcome);
    }
    Ok(HostileReport {
        format: 1,
        benchmark: "control-hostile",
        version: env!("CARGO_PKG_VERSION"),
        started,
        machine,
        services: args.services as usize,
        connections: args.connections as usize,
        seconds: args.seconds.as_secs_f64(),
        tls: args.tls,
        attacks: outcomes,
    })
}

async fn one(args: &ControlArgs, folder: &Path, attack: Attack) -> anyhow::Result<AttackResult> {
    let (services, namespaces) = (args.services as usize, args.namespaces as usize);
    let config = folder.join("config");
    let mut mesh = Mesh::write(Store::folder(&config)?, services, namespaces, args.endpoints as usize)?;
    // A second family of virtual hosts, so that no family is all of them: that would be encoded once for all streams.
    fs::write(config.join("other.yaml"), OTHER_PORT).context("cannot write the configuration")?;
    let ids = (0..namespaces).map(|number| format!("spiffe://cluster.local/ns/ns-{number}/sa/default"));
    let ca = folder.join("ca");
    let certificates = certificates::of_control_plane(&ca, ids, "istiod.istio-system.svc")?;
    let tls: Vec<Tls> = if args.tls {
        certificates.iter().map(|one| tls::mesh(one, b"h2", false)).collect::<Result<_, _>>()?
    } else {
        Vec::new()
    };
    let server = Server::start(ServerArgs {
        skysail: args.skysail.as_deref(),
        tls: args.tls,
        further: &[],
        folder,
        source: Source::Folder(&config),
        ca: &ca,
    })
    .await?;
    let mut plan = Plan {
        form: Form::Delta,
        subscription: Subscription::Mesh,
        sidecars: usize::MAX,
        is_large: false,
        has_secrets: false,
        services,
        namespaces,
        used: args.used as usize,
        uses_vhds: true,
        endpoint_names: Vec::new(),
        first_endpoints: HashSet::new(),
        route_names: Vec::new(),
    };
    learn(&mut plan, server.target, tls.first(), TIMEOUT)?;
    let mut fleet = Fleet::new(server.target, tls.clone(), &plan, 1)?;
    fleet.connect(0..1, 1, TIMEOUT)?;
    fleet.rest(SETTLE)?;
    let before_mb = server.resident();

    let stop = Arc::new(AtomicBool::new(false));
    let environment =
        AttackEnvironment::new(server.target, tls.into_iter().next(), args.connections as usize, &plan);
    let (cpu, start) = (server.cpu()?, Instant::now());
    let attacker = {
        let stop = Arc::clone(&stop);
        thread::spawn(move || attack.run(environment, || stop.load(Relaxed)))
    };
    let (mut moments, mut peak_mb, mut failed) = (Vec::new(), before_mb, None);
    while start.elapsed() < args.seconds && failed.is_none() && !attacker.is_finished() {
        match change_endpoint(&mut fleet, &mut mesh) {
            Ok(took) => moments.push(took),
            Err(error) => failed = Some(format!("{error:#}")),
        }
        let next = Instant::now() + BETWEEN_CHANGES;
        while Instant::now() < next && failed.is_none() {
            peak_mb = f64::max(peak_mb, server.resident());
            if let Err(error) = fleet.rest(Duration::from_millis(25)) {
                failed = Some(format!("{error:#}"));
            }
        }
    }
    let cpus = (server.cpu()? - cpu) as f64 / start.elapsed().as_nanos() as f64;
    stop.store(true, Relaxed);
    let spent = attacker.join().map_err(|_| anyhow!("the attacker panicked"))??;
    drop(fleet);
    tokio::time::sleep(AFTER_EFFECTS).await;
    let after_mb = server.resident();
    server.running.stop().await;
    Ok(AttackResult {
        attack,
        before_mb,
        peak_mb,
        after_mb,
        cpus,
        sent_mb: spent.sent as f64 / 1e6,
        read_mb: spent.read as f64 / 1e6,
        connections: spent.opened,
        honest_ms: Quantiles::of(moments),
        failed,
    })
}

/// Changes an endpoint. Returns the nanoseconds until the honest sidecar has it.
fn change_endpoint(fleet: &mut Fleet<'_>, mesh: &mut Mesh) -> anyhow::Result<u64> {
    let expected = fleet.begin_wait(Kind::Endpoint, |_, _| true);
    let began = clock::now();
    mesh.change(Change::Endpoint)?;
    fleet.wait(expected, TIMEOUT / 4)?;
    fleet
        .received
        .changed
        .first()
        .map(|at| at - began)
        .context("the honest sidecar has not received the change")
}

impl HostileReport {
    pub(super) fn table(&self) -> String {
        let row = |one: &AttackResult| {
            let honest =
                |value: f64| if one.failed.is_some() { "-".to_owned() } else { format!("{value:.1}") };
            vec![
                one.attack.to_string(),
                format!("{:.0}", one.before_mb),
                format!("{:.0}", one.peak_mb),
                format!("{:.0}", one.after_mb),
                format!("{:.2}", one.cpus),
                format!("{:.1}", one.sent_mb),
                format!("{:.1}", one.read_mb),
                one.connections.to_string(),
                honest(one.honest_ms.p50),
                honest(one.honest_ms.p99),
                honest(one.honest_ms.last),
            ]
        };
        let rows: Vec<_> = self.attacks.iter().map(row).collect();
        let mut text = format!(
            "{}\n\n{}",
            layout::tables(1, &COLUMNS.map(str::to_owned), &rows),
            layout::paragraph(LEGEND)
        );
        for one in &self.attacks {
            if let Some(error) = &one.failed {
                let line = format!("{}: the honest sidecar failed: {error}", one.attack);
                text.push('\n');
                text.push_str(&layout::paragraph(&line));
            }
        }
        text
    }
}

const COLUMNS: [&str; 11] = [
    "attack",
    "MB before",
    "peak",
    "after",
    "cores",
    "sent MB",
    "read MB",
    "connections",
    "honest P50 ms",
    "honest P99 ms",
    "honest last ms",
];
const LEGEND: &str = "MB: resident memory of the control plane. cores: its CPU time. sent, read, connections: of the \
    attacker. honest: from the change of an endpoint until an honest sidecar has it.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_fits_a_terminal() {
        let outcome = |attack| AttackResult {
            attack,
            before_mb: 12_345.0,
            peak_mb: 65_536.0,
            after_mb: 12_345.0,
            cpus: 63.99,
            sent_mb: 123_456.7,
            read_mb: 123_456.7,
            connections: 12_345_678,
            honest_ms: Quantiles { p50: 12_345.6, p99: 29_999.9, last: 29_999.9 },
            failed: None,
        };
        let mut attacks: Vec<_> = Attack::all().into_iter().map(outcome).collect();
        attacks[0].failed = Some(format!("the control plane ended: {}", "x ".repeat(200)));
        let report = HostileReport {
            format: 1,
            benchmark: "control-hostile",
            version: "0",
            started: 0,
            machine: stage::machine(None, &Ok(()), None),
            services: 60_000,
            connections: 1_000,
            seconds: 3_600.0,
            tls: true,
            attacks,
        };
        let text = report.table();
        layout::assert_fits(&text);
        assert!(text.contains("honest P50 ms") && text.contains(" 12345678 |"), "{text}");
        assert!(text.contains("failed: the control plane ended: x x"), "{text}");
    }
}
