//! Takes the turns of a scenario of generation.

use std::path::PathBuf;

use anyhow::Context as _;

use super::GenerationScenario;
use crate::{
    generation::{self, PreparedInput},
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
/// An object of an input is refused.
pub(in crate::scenario) fn run(
    scenario: GenerationScenario,
    size: SizeName,
    rounds: Option<u32>,
    machine: Machine,
) -> anyhow::Result<CaseResult<GenerationScenario>> {
    let of_size = scenario.sizes.of(size);
    let settings = CaseSettings {
        cases: scenario.inputs(size),
        rounds: rounds.unwrap_or(of_size.rounds),
        seconds: of_size.seconds,
        warmup: of_size.warmup,
    };
    let prepared: anyhow::Result<Vec<(String, PreparedInput)>> =
        settings.cases.iter().map(|input| Ok((input.name().to_owned(), input.prepare()?))).collect();
    let prepared = prepared?;
    let peers: [(Peer, PathBuf); 1] = [(Peer::Skysail, std::env::current_exe()?)];
    cases::run(scenario, size, settings, (machine, &peers), async |input, warmup, window| {
        let of_name = prepared.iter().find(|(name, _)| name == input.name());
        let (_, input) = of_name.context("the input was not prepared")?;
        generation::measure(input, warmup, window)
    })
}
