//! `skysail explain`: the decisions that the mesh makes about a request, with the objects that cause them.
//!
//! [`request`] reads the request. [`proxies`] has the configuration of the proxies. [`journey`] follows the
//! request from its client, [`places`] from proxy to proxy. [`hop`] describes the decisions of one proxy,
//! [`gateway`] those of a gateway, [`excluded`] the rules for other clients. [`sources`] finds the objects
//! behind each decision. [`served`] asks a control plane what it serves. [`ends`] summarises the results.
//! [`text`] prints the [`report`].

mod ends;
mod excluded;
mod gateway;
mod hop;
mod journey;
mod places;
mod proxies;
mod report;
mod request;
mod served;
mod sources;
mod text;

use std::{
    collections::HashMap,
    env, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, anyhow, bail};
use skysail_core::stdio;
use skysail_model::{KeySource, key_set};
use skysail_proxy::explain::HeldResources;
use skysail_sandbox::{Offline, OfflinePod, rundir};

use self::{
    journey::{OUTSIDE, Start},
    proxies::{Held, Proxies},
    request::ParsedRequest,
    served::ControlPlane,
};
use crate::{exit, input::Input, view::Output};

/// Arguments of `skysail explain`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skysail explain -f shop/ --from shop/web http://reviews:9080/reviews/1
  skysail explain -f shop/ --from web -H 'end-user: jason' http://reviews:9080/ --output json
  skysail explain -f shop/ --from outside https://shop.example.com/
  skysail explain -f shop/ --from web tcp://db:5432
  skysail explain --from shop/web http://reviews:9080/reviews/1     what the proxies of the running mesh hold
  skysail explain -f shop/ --config-dump web=dump.json --from web http://reviews:9080/     what this proxy holds
  skysail explain -f shop/ --control localhost:15014 --from web http://reviews:9080/     what a control plane serves

The request is not sent. The explanation lists, for each proxy on its way, the listener, the filter chain, the routes \
with the reasons why they do not match, the filters and policies with their verdicts, the cluster and its endpoints, \
each with the object, file and line that caused it.

The exit code is 0 if the request would be served, 1 if it would be refused or is not explained completely, \
and 2 for wrong usage.")]
pub(crate) struct ExplainArgs {
    /// Folder or file with the configuration; `-` is standard input. May be given several times. Without it, the
    /// proxies of the running mesh are asked what they hold.
    #[arg(short, long = "file", value_name = "PATH")]
    files: Vec<PathBuf>,
    /// Client: a workload or pod (NAMESPACE/NAME, or NAME if it is unique), or the address of a pod. `outside`, or
    /// another address, is a client outside the mesh that connects to a gateway.
    #[arg(long, value_name = "WORKLOAD")]
    from: String,
    /// Gateway that a client outside the mesh connects to, if several have the port and the host.
    #[arg(long, value_name = "WORKLOAD")]
    gateway: Option<String>,
    /// Key set (JSON file) that verifies tokens of rules with a `jwksUri`. Nothing is fetched for `-f`: without a key
    /// set their signatures are taken as valid.
    #[arg(long, value_name = "FILE", requires = "files")]
    jwks: Option<PathBuf>,
    /// What the proxy of a workload or pod holds: a file with its page `/config_dump?include_eds`, of skysail-proxy or
    /// of Envoy. May be given several times. Other proxies hold what the control plane compiles from the files.
    #[arg(long, value_name = "WORKLOAD=FILE", requires = "files")]
    config_dump: Vec<String>,
    /// Admin address of a control plane, such as that of `kubectl port-forward`. It is asked what it serves to each proxy
    /// on the path. The files name the objects; they should be those that it reads.
    #[arg(long, value_name = "HOST:PORT", requires = "files", conflicts_with = "config_dump")]
    control: Option<String>,
    #[command(flatten)]
    request: request::RequestArgs,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    /// Name of the mesh, if several are running.
    #[arg(long, conflicts_with = "files")]
    name: Option<String>,
}

pub(crate) fn run(args: &ExplainArgs) -> anyhow::Result<u8> {
    let request = ParsedRequest::new(&args.request)?;
    let (mesh, held) = if args.files.is_empty() {
        let state = rundir::find(args.name.as_deref())?;
        (Offline::running(&state)?, Held::Running(state.name))
    } else {
        let Input { paths, text } = Input::read(args.files.clone())?;
        let control = args.control.as_deref().map(ControlPlane::connect).transpose()?;
        let mut mesh = match &control {
            Some(control) => Offline::connected(&paths, text.as_deref(), &control.proxies)?,
            None => Offline::read(&paths, text.as_deref())?,
        };
        if let Some(file) = &args.jwks {
            add_keys(&mut mesh, file).with_context(|| format!("--jwks {}", file.display()))?;
        }
        let held = match control {
            Some(control) => Held::Served(control),
            None => Held::Pages(pages(&mesh, &args.config_dump)?),
        };
        (mesh, held)
    };
    let start = start(&mesh, args)?;
    let proxies = Proxies::new(&mesh, held);
    let report = journey::follow(&proxies, &start, &request);
    match args.output {
        Output::Text => {
            let base = env::current_dir().unwrap_or_default();
            stdio::print(text::of(&report, &base))?;
        }
        Output::Json => stdio::print(serde_json::to_string_pretty(&report)?)?,
    }
    Ok(exit::of(report.served))
}

/// Reads the files of `--config-dump`. The result has the pages by namespace and name of the pod.
fn pages(mesh: &Offline, dumps: &[String]) -> anyhow::Result<HashMap<(String, String), Vec<u8>>> {
    let mut pages = HashMap::new();
    for dump in dumps {
        let Some((workload, file)) = dump.split_once('=') else {
            bail!("--config-dump {dump}: write WORKLOAD=FILE");
        };
        let page = fs::read(file).with_context(|| format!("--config-dump {dump}"))?;
        HeldResources::read(&page, Vec::new()).with_context(|| format!("--config-dump {dump}"))?;
        let pods = mesh.matching(workload);
        if pods.is_empty() {
            bail!("--config-dump {dump}: the configuration has no workload or pod {workload}");
        }
        pages.extend(pods.iter().map(|pod| ((pod.namespace.clone(), pod.name.clone()), page.clone())));
    }
    Ok(pages)
}

/// Sets a file as the key set of all rules whose keys the control plane would fetch.
fn add_keys(mesh: &mut Offline, file: &Path) -> anyhow::Result<()> {
    let text = fs::read_to_string(file)?;
    key_set(&text).map_err(|reason| anyhow!("the file is not a key set: {reason}"))?;
    let keys: Arc<str> = text.into();
    let sources: Vec<KeySource> = mesh.world.key_fetches().into_keys().collect();
    if sources.is_empty() {
        bail!("no RequestAuthentication has a jwksUri");
    }
    for source in &sources {
        mesh.world.set_key_set(source, Some(Arc::clone(&keys)));
    }
    Ok(())
}

/// Returns the client.
fn start<'a>(mesh: &'a Offline, args: &'a ExplainArgs) -> anyhow::Result<Start<'a>> {
    let from = args.from.as_str();
    let found = mesh.matching(from);
    let address = if from == "outside" { Some(OUTSIDE) } else { from.parse().ok() };
    if let Some(address) = address.filter(|_| found.is_empty()) {
        return Ok(Start::Outside { address, gateway: args.gateway.as_deref() });
    }
    let Some(first) = found.first() else {
        let mut known: Vec<String> = mesh.pods.iter().map(workload).collect();
        known.dedup();
        let listed = match known.is_empty() {
            true => "there is none".to_owned(),
            false => format!("it has {}", known.join(", ")),
        };
        bail!("--from {from}: the configuration has no such workload or pod; {listed}");
    };
    if found.iter().any(|pod| pod.namespace != first.namespace) {
        bail!("--from {from}: the name is in several namespaces: write NAMESPACE/{from}");
    }
    Ok(Start::Pod(first))
}

fn workload(pod: &OfflinePod) -> String {
    format!("{}/{}", pod.namespace, pod.owner.name)
}
