//! Takes the turns of a scenario of the airline example.

use std::path::PathBuf;

use super::AirlineScenario;
use crate::{
    airline,
    mesh::MeshPrograms,
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
    scenario: AirlineScenario,
    size: SizeName,
    rounds: Option<u32>,
    peers: &[(Peer, PathBuf)],
    machine: Machine,
) -> anyhow::Result<CaseResult<AirlineScenario>> {
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
    cases::run(scenario, size, settings, (machine, peers), async |case, warmup, window| {
        let sidecars = case.peer.and_then(|peer| Some((peer, program(peer)?)));
        let programs = MeshPrograms { skysail: skysail.clone(), sidecars };
        airline::measure((case.variant, case.database), &programs, &case.load, (warmup, window)).await
    })
}
