//! Generation of configuration in process: what the control plane does from the text of the objects to the resources of a
//! new proxy.
//!
//! [`inputs`] writes the objects. [`measure`] calls the same functions as the control plane, and measures each
//! [`Phase`] apart. Everything runs on one thread, so CPU time is that of the thread.

mod inputs;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use serde_json::json;
use skysail_model::{
    ClientScope, Files, Part, ProxyNode, World, api::kube::Locality, compile_own, compile_part, outline,
    parse, parts,
};
use skysail_xds::{Kind, Resources};

pub(crate) use self::inputs::InputTemplate;
use self::inputs::{ADDRESS, LABEL};

/// Name of the file in diagnostics.
const FILE: &str = "input.yaml";
/// Namespace of the proxy, and of objects that name none.
const NAMESPACE: &str = "default";

/// Objects to write, and the kind of the proxy that receives their resources.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GenerationInput {
    /// Name in results. Default: that of the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    pub(crate) template: InputTemplate,
    /// Number of services, or of the objects that the template repeats.
    #[serde(default)]
    pub(crate) services: u32,
    /// Number of WorkloadEntries, or of endpoints of each service.
    #[serde(default)]
    pub(crate) instances: u32,
}

/// Kind of a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProxyKind {
    Sidecar,
    Gateway,
}

/// Step of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// Text to typed and validated objects.
    Parse,
    /// Objects into the World.
    Index,
    /// Clusters and endpoints of services.
    Services,
    /// Routes of sidecars.
    Routes,
    /// Name table, and trust bundles.
    Names,
    /// Resources that depend on the workload: listeners, inbound clusters; routes and secrets of gateways.
    Own,
}

/// Cost of a phase, the mean of the repetitions in a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct PhaseCost {
    /// CPU time in microseconds.
    pub(crate) cpu_us: f64,
    /// Elapsed time in microseconds.
    pub(crate) time_us: f64,
}

/// Resources of a type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResourceCount {
    pub(crate) number: usize,
    /// Bytes of the encoded messages.
    pub(crate) bytes: usize,
}

/// Figures of a turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct GenerationMeasurement {
    /// Number of objects in the input.
    pub(crate) objects: usize,
    /// Length of the input in bytes.
    pub(crate) input_bytes: usize,
    /// Number of repetitions.
    pub(crate) repetitions: u32,
    pub(crate) phases: BTreeMap<Phase, PhaseCost>,
    /// Compiled resources by the short name of their discovery service.
    pub(crate) resources: BTreeMap<String, ResourceCount>,
}

/// An input as text, with its proxy.
pub(crate) struct PreparedInput {
    text: String,
    node: ProxyNode,
}

impl GenerationInput {
    /// Returns the name in results.
    pub(crate) fn name(&self) -> &str {
        self.name.as_deref().unwrap_or_else(|| self.template.name())
    }

    /// Returns the input with at most this number of services and instances.
    pub(crate) fn limited(&self, most: u32) -> Self {
        Self { services: self.services.min(most), instances: self.instances.min(most), ..self.clone() }
    }

    /// Writes the objects, and checks that all of them are valid.
    ///
    /// # Errors
    /// An object is refused.
    pub(crate) fn prepare(&self) -> anyhow::Result<PreparedInput> {
        let text = inputs::text(self)?;
        if let Some((key, refused)) = parse(&text, FILE).refused.first_key_value() {
            bail!("{}: {key} on line {} of the input is refused", self.name(), refused.line);
        }
        let node = node(self.template.proxy()).context("the node of the proxy is invalid")?;
        Ok(PreparedInput { text, node })
    }
}

impl ProxyKind {
    /// Returns the name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sidecar => "sidecar",
            Self::Gateway => "gateway",
        }
    }
}

impl Phase {
    /// Returns the name in figures.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Parse => "parse",
            Self::Index => "index",
            Self::Services => "services",
            Self::Routes => "routes",
            Self::Names => "names",
            Self::Own => "own",
        }
    }

    /// Returns whether the phase makes resources.
    pub(crate) fn is_compilation(self) -> bool {
        !matches!(self, Self::Parse | Self::Index)
    }
}

/// Measures an input: repeats all phases during `warmup`, then during `window`, at least once each.
///
/// # Errors
/// The input gives no resources.
pub(crate) fn measure(
    input: &PreparedInput,
    warmup: Duration,
    window: Duration,
) -> anyhow::Result<GenerationMeasurement> {
    repeat(input, warmup)?;
    let (repetitions, objects, sum, made) = repeat(input, window)?;
    let mean = |total: Duration| total.as_secs_f64() * 1e6 / f64::from(repetitions);
    let phase = |(phase, [cpu, time]): (Phase, [Duration; 2])| {
        (phase, PhaseCost { cpu_us: mean(cpu), time_us: mean(time) })
    };
    Ok(GenerationMeasurement {
        objects,
        input_bytes: input.text.len(),
        repetitions,
        phases: sum.into_iter().map(phase).collect(),
        resources: Kind::ALL.into_iter().map(|kind| (kind.short().to_owned(), count(&made, kind))).collect(),
    })
}

/// CPU time and elapsed time by phase.
type PhaseTimes = BTreeMap<Phase, [Duration; 2]>;

fn repeat(input: &PreparedInput, window: Duration) -> anyhow::Result<(u32, usize, PhaseTimes, Resources)> {
    let (mut sum, mut repetitions, began) = (PhaseTimes::new(), 0, Instant::now());
    loop {
        let (objects, made) = generate(input, &mut sum)?;
        repetitions += 1;
        if began.elapsed() >= window {
            return Ok((repetitions, objects, sum, made));
        }
    }
}

/// Runs all phases once. Adds their times. Returns the number of objects, and the resources of the proxy.
fn generate(input: &PreparedInput, times: &mut PhaseTimes) -> anyhow::Result<(usize, Resources)> {
    let mut clock = PhaseClock::start(times)?;
    let parsed = parse(&input.text, FILE);
    clock.end(Phase::Parse)?;
    let (objects, mut files, mut world) = (parsed.objects.len(), Files::new(), World::new());
    for change in files.take(0, FILE, parsed) {
        change.apply_to(&mut world);
    }
    world.take_changes();
    let mut node = input.node.clone();
    world.identify(&mut node, &input.node.view.cluster_id)?;
    let view = node.view;
    let scope = ClientScope::of(&view, &world.grouping());
    clock.end(Phase::Index)?;

    let all = parts(&world, &scope);
    let mut made = Resources::default();
    for phase in [Phase::Services, Phase::Routes, Phase::Names] {
        for part in all.iter().filter(|part| phase_of(part) == phase) {
            compile_part(&world, &scope, part).into_iter().for_each(|resource| made.insert(resource));
        }
        clock.end(phase)?;
    }
    let (own, _) = compile_own(&world, &view, &outline(&world, &scope));
    clock.end(Phase::Own)?;
    Kind::ALL.into_iter().flat_map(|kind| own.iter(kind)).for_each(|resource| made.insert(resource.clone()));
    ensure!(made.len(Kind::Listener) > 0, "the proxy gets no listeners");
    Ok((objects, made))
}

fn phase_of(part: &Part) -> Phase {
    match part {
        Part::Service(..) => Phase::Services,
        Part::Routes => Phase::Routes,
        Part::Names | Part::Trust => Phase::Names,
    }
}

/// Returns the node as Istio's agent declares it, for an Envoy with an identity.
fn node(proxy: ProxyKind) -> anyhow::Result<ProxyNode> {
    let role = match proxy {
        ProxyKind::Sidecar => "sidecar",
        ProxyKind::Gateway => "router",
    };
    let id = format!("{role}~{ADDRESS}~measured.{NAMESPACE}~{NAMESPACE}.svc.cluster.local");
    let labels = match proxy {
        ProxyKind::Sidecar => json!({"app": "measured"}),
        ProxyKind::Gateway => json!({LABEL.0: LABEL.1}),
    };
    let metadata = json!({"NAMESPACE": NAMESPACE, "LABELS": labels, "CLUSTER_ID": "Kubernetes"});
    let mut node = ProxyNode::parse(&id, metadata, Locality::default())?;
    node.view.is_authenticated = true;
    Ok(node)
}

fn count(made: &Resources, kind: Kind) -> ResourceCount {
    let bytes = made.iter(kind).map(|resource| resource.body.len());
    ResourceCount { number: made.len(kind), bytes: bytes.sum() }
}

/// Attributes time to phases.
struct PhaseClock<'a> {
    times: &'a mut PhaseTimes,
    last: (Duration, Instant),
}

impl<'a> PhaseClock<'a> {
    fn start(times: &'a mut PhaseTimes) -> anyhow::Result<Self> {
        Ok(Self { times, last: Self::now()? })
    }

    /// Adds the time since the last call to a phase.
    fn end(&mut self, phase: Phase) -> anyhow::Result<()> {
        let now = Self::now()?;
        let [cpu, time] = self.times.entry(phase).or_default();
        *cpu += now.0.saturating_sub(self.last.0);
        *time += now.1.duration_since(self.last.1);
        self.last = Self::now()?;
        Ok(())
    }

    fn now() -> anyhow::Result<(Duration, Instant)> {
        let cpu = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
            .context("the kernel reports no CPU time of the thread")?;
        Ok((cpu.into(), Instant::now()))
    }
}
