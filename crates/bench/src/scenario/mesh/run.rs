//! Takes the turns of a scenario of a mesh.

use std::path::PathBuf;

use super::{MeshScenario, format::MeshCase, phases::PhaseInput};
use crate::{
    graph::GraphDeployment,
    mesh::{self, MeshLoad, MeshPrograms},
    peers::Peer,
    report::Machine,
    scenario::{
        cases::{self, CaseResult, CaseSettings},
        format::SizeName,
    },
};

/// Takes all turns. A signal ends them early.
///
/// # Errors
/// This program's file cannot be found.
pub(in crate::scenario) fn run(
    scenario: MeshScenario,
    size: SizeName,
    rounds: Option<u32>,
    peers: &[(Peer, PathBuf)],
    machine: Machine,
) -> anyhow::Result<CaseResult<MeshScenario>> {
    let of_size = scenario.sizes.of(size);
    let names: Vec<Peer> = peers.iter().map(|(peer, _)| *peer).collect();
    let settings = CaseSettings {
        cases: scenario.cases(size, &names),
        rounds: rounds.unwrap_or(of_size.rounds),
        seconds: of_size.seconds,
        warmup: of_size.warmup,
    };
    let program = |peer: Peer| peers.iter().find(|(of, _)| *of == peer).map(|(_, program)| program.clone());
    let skysail = program(Peer::Skysail).map_or_else(std::env::current_exe, Ok)?;
    let is_group = |first: &MeshCase, second: &MeshCase| {
        (first.peer, &first.mesh.name) == (second.peer, &second.mesh.name)
    };
    cases::run_groups(scenario, size, settings, (machine, peers), is_group, async |cases, warmup, window| {
        let Some(MeshCase { mesh: of, peer, .. }) = cases.first() else { return Ok(Vec::new()) };
        let mut deployment = GraphDeployment::new(&of.graph, of.policies)?;
        deployment.objects.push_str(of.telemetry.objects());
        let sidecars = peer.and_then(|peer| Some((peer, program(peer)?)));
        let programs = MeshPrograms { skysail: skysail.clone(), sidecars };
        let load = MeshLoad { rate: of.rate, connections: of.connections, warmup, window };
        let phases: Vec<_> = cases.iter().map(|case| PhaseInput::measured(case.phase())).collect();
        mesh::measure(&deployment, &programs, &load, &phases).await
    })
}
