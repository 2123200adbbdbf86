//! Scenarios and results of all studies. The field `study` of a scenario selects the format of both.

use std::path::Path;

use anyhow::Context as _;
use serde_json::Value;
use skysail_yaml::Node;

use super::{
    BENCHMARK, ScenarioResult,
    airline::AirlineScenario,
    cases::CaseResult,
    command::CommandScenario,
    document,
    format::{Scenario, SizeName},
    generation::GenerationScenario,
    mesh::MeshScenario,
    networks::NetworksScenario,
};
use crate::results;

/// Value of `study` in scenarios of generation.
const GENERATION: &str = "generation";
/// Value of `study` in scenarios of a mesh.
const MESH: &str = "mesh";
/// Value of `study` in scenarios of networks.
const NETWORKS: &str = "networks";
/// Value of `study` in scenarios of the airline example.
const AIRLINE: &str = "airline";
/// Values of `study` in scenarios of other benchmarks.
const COMMANDS: [&str; 2] = ["control", "dns"];
/// Maximum size of a result file in bytes.
const MAX_FILE: u64 = 64 << 20;

/// A scenario of any study.
pub(super) enum AnyScenario {
    Traffic(Scenario),
    Generation(GenerationScenario),
    Mesh(MeshScenario),
    Command(CommandScenario),
    Networks(NetworksScenario),
    Airline(AirlineScenario),
}

/// A result of any study.
pub(super) enum AnyResult {
    Traffic(Box<ScenarioResult>),
    Generation(Box<CaseResult<GenerationScenario>>),
    Mesh(Box<CaseResult<MeshScenario>>),
    Command(Box<CaseResult<CommandScenario>>),
    Networks(Box<CaseResult<NetworksScenario>>),
    Airline(Box<CaseResult<AirlineScenario>>),
}

impl AnyScenario {
    /// Reads a file.
    ///
    /// # Errors
    /// The file cannot be read, is not one YAML document, or has an unknown, missing or repeated field or a value out
    /// of bounds. The message names the line and the field.
    pub(super) fn read(file: &Path) -> anyhow::Result<Self> {
        let root = document::read(file)?;
        Self::of(&root).map_err(|error| anyhow::anyhow!("{}:{error}", file.display()))
    }

    /// Fails if the scenario has no size of this name.
    pub(super) fn check_size(&self, size: SizeName) -> anyhow::Result<()> {
        match self {
            Self::Traffic(scenario) => scenario.check_size(size),
            Self::Generation(scenario) => scenario.check_size(size),
            Self::Mesh(scenario) => scenario.check_size(size),
            Self::Command(scenario) => scenario.check_size(size),
            Self::Networks(scenario) => scenario.check_size(size),
            Self::Airline(scenario) => scenario.check_size(size),
        }
    }

    fn of(root: &Node) -> Result<Self, String> {
        match root.get("study").and_then(Node::text) {
            Some(GENERATION) => GenerationScenario::of(root).map(Self::Generation),
            Some(MESH) => MeshScenario::of(root).map(Self::Mesh),
            Some(NETWORKS) => NetworksScenario::of(root).map(Self::Networks),
            Some(AIRLINE) => AirlineScenario::of(root).map(Self::Airline),
            Some(study) if COMMANDS.contains(&study) => CommandScenario::of(root).map(Self::Command),
            _ => Scenario::of(root).map(Self::Traffic),
        }
    }
}

/// Reads a result file and computes the summary of the result. Returns `None` for the result of another benchmark.
pub(super) fn read(file: &Path) -> anyhow::Result<Option<AnyResult>> {
    let name = file.display();
    let text = results::read_text(file, MAX_FILE).with_context(|| format!("cannot read {name}"))?;
    parse(text.as_bytes()).with_context(|| format!("{name} is not a result of bench run"))
}

pub(super) fn parse(text: &[u8]) -> anyhow::Result<Option<AnyResult>> {
    let value: Value = serde_json::from_slice(text)?;
    if value["benchmark"] != BENCHMARK {
        return Ok(None);
    }
    Ok(Some(match value["scenario"]["study"].as_str() {
        Some(GENERATION) => AnyResult::Generation(Box::new(CaseResult::of(value)?)),
        Some(MESH) => AnyResult::Mesh(Box::new(CaseResult::of(value)?)),
        Some(NETWORKS) => AnyResult::Networks(Box::new(CaseResult::of(value)?)),
        Some(AIRLINE) => AnyResult::Airline(Box::new(CaseResult::of(value)?)),
        Some(study) if COMMANDS.contains(&study) => AnyResult::Command(Box::new(CaseResult::of(value)?)),
        _ => AnyResult::Traffic(Box::new(ScenarioResult::of(value)?)),
    }))
}
