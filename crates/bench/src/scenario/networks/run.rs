//! Takes the turns of a scenario of networks.

use std::{collections::BTreeMap, path::PathBuf};

use super::NetworksScenario;
use crate::{
    latency,
    network::NotAvailable,
    peers::Peer,
    report::{Machine, Series},
    scenario::{
        cases::{self, CaseResult, CaseSettings},
        format::SizeName,
    },
    topology::{self, HostPair, Setup, Topology},
};

/// Builds the networks and takes all turns. A signal ends them early.
///
/// # Errors
/// A network cannot be built, for another reason than that the machine lacks something.
pub(in crate::scenario) fn run(
    scenario: NetworksScenario,
    size: SizeName,
    rounds: Option<u32>,
    peers: &[(Peer, PathBuf)],
    (setup, machine): (&Setup, Machine),
) -> anyhow::Result<CaseResult<NetworksScenario>> {
    let of_run = scenario.settings(size, rounds);
    let names: Vec<Peer> = peers.iter().map(|(peer, _)| *peer).collect();
    let settings = CaseSettings {
        cases: scenario.cases(&of_run.connections, &names),
        rounds: of_run.rounds,
        seconds: of_run.seconds,
        warmup: of_run.warmup,
    };
    let mut networks: BTreeMap<String, Result<HostPair, NotAvailable>> = BTreeMap::new();
    for network in &scenario.networks {
        let hosts = match network.build() {
            Err(error) if error.is::<NotAvailable>() => Err(NotAvailable(format!("{error:#}"))),
            built => Ok(built?),
        };
        networks.insert(network.name.clone(), hosts);
    }
    cases::run(scenario, size, settings, (machine, peers), async |case, _, _| {
        let hosts = networks.get(&case.network).cloned();
        let hosts =
            hosts.ok_or_else(|| anyhow::anyhow!("the scenario has no network {}", case.network))??;
        let setup = Setup { hosts, ..setup.clone() };
        let topology = if case.peer.is_some() { Topology::BothSidecars } else { Topology::Baseline };
        let series = Series { topology, peer: case.peer, ..Series::BASELINE };
        let (shape, load) = latency::shape_and_load(&of_run, series, case.connections)?;
        let program = peers.iter().find(|(peer, _)| Some(*peer) == case.peer);
        let program = program.map(|(peer, program)| (*peer, program.as_path()));
        topology::measure(&setup, shape, program, load).await
    })
}
