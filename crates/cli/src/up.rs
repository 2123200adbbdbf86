//! `skysail up`: the outer process prepares and enters namespaces; the inner one runs and monitors the mesh
//! ([`monitor`](mod@monitor)).

mod monitor;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    num::NonZeroU32,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use skysail_core::stdio;
use skysail_sandbox::{Capacity, Settings, Survey, isolate, rundir};

use self::monitor::{MonitorOrder, monitor};
use crate::{exit, input::Input, publish, validated, view::Output};

/// Arguments of `skysail up`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Each pod of a workload gets a network namespace with an IP address, its processes and a sidecar. Services have virtual \
IP addresses, names resolve as in a cluster, and all connections pass through the sidecars. --image names the program \
for an image; for other images an echo server runs. Files are watched: edits take effect while the mesh runs. \
The machine's own configuration is not changed. At the end, everything that the mesh created is removed, except the \
logs of an unhealthy mesh.\n\n\
On the host, -p 8080:web:80 forwards port 8080 to port 80 of the Service (or workload) web, as plain text from outside of the mesh. \
Services of type LoadBalancer or NodePort are published without it. Sidecars log requests: `skysail logs WORKLOAD -c \
proxy`. `accessLogFile: \"\"` in the mesh configuration (ConfigMap istio in istio-system), or \
--control-arg=--default-access-log= turns that off.\n\n\
A mesh is healthy if every workload is ready, the configuration has no errors, and at least 99 % of the requests \
between each pair of workloads succeed. Status 4xx is not a failure; 403 is counted as denied. The exit code is 0 if \
the mesh was healthy when it ended, by --for or by Ctrl-C, 1 if it was not, and 2 if it could not be run.\n\n\
Files without a workload, such as routing rules alone, are checked and nothing is run.")]
pub(crate) struct UpArgs {
    /// Folders or files of Kubernetes and Istio YAML; - is standard input, as in `kustomize build DIR | skysail up -`.
    #[arg(required = true, value_name = "PATH")]
    config: Vec<PathBuf>,
    /// Name of the mesh, for `skysail exec` and other commands [default: the name of the first path].
    #[arg(long)]
    name: Option<String>,
    /// Program to run for an image, with or without a tag: acme/shop=./shop. May be given several times. The
    /// container's `args` are appended.
    #[arg(long = "image", value_name = "IMAGE=COMMAND", value_parser = image)]
    images: Vec<(String, Vec<String>)>,
    /// Publish a port of a Service or workload on this machine, such as -p 8080:web:80; may be given several times. The
    /// default address is 127.0.0.1; port 0 is any free one.
    #[arg(short, long, value_name = "[ADDRESS:]PORT:NAME:PORT")]
    publish: Vec<publish::PortMapping>,
    /// Let workloads connect to hosts outside of the mesh (TCP, IPv4), as this machine's network allows, and resolve
    /// their names with its resolver. Addresses of this machine itself and of clouds' metadata services stay closed.
    #[arg(long)]
    egress: bool,
    /// Time from the readiness of all workloads until the mesh ends, such as 30s or 5m.
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    time: Option<Duration>,
    /// Format of the result. With json it is one document at the end, and progress is written to standard error.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    /// Run the `command` of containers for whose image no --image is given, with this machine's programs and files.
    #[arg(long)]
    run_commands: bool,
    /// Maximum number of pods, 1000 at most [default: derived from this machine's memory and limits].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    max_pods: Option<u16>,
    /// Worker threads of each sidecar.
    #[arg(long, value_name = "N", default_value_t = NonZeroU32::MIN, value_parser = concurrency)]
    concurrency: NonZeroU32,
    /// Time within which all workloads must be ready; otherwise the mesh counts as unhealthy.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    ready_within: Duration,
    /// Minimum interval between two reads of the metrics of all sidecars. The table shows the requests until the last read,
    /// the result at the end all requests.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    metrics_interval: Duration,
    /// Run an Envoy as the sidecar of a workload, with the same configuration; may be given several times. Any public
    /// build works. The table shows only those of its calls whose destination has a Skysail sidecar.
    #[arg(long = "envoy", value_name = "NAMESPACE/WORKLOAD=PROGRAM", value_parser = envoy)]
    envoys: Vec<(String, PathBuf)>,
    /// Additional argument for the control plane, such as --control-arg=--cert-ttl=1h; may be given several times.
    #[arg(long = "control-arg", value_name = "ARGUMENT", allow_hyphen_values = true)]
    control_arguments: Vec<String>,
    /// Run pods and Services only, without a control plane and sidecars.
    #[arg(long, conflicts_with_all = ["envoys", "control_arguments", "concurrency"])]
    plain: bool,
}

/// Arguments of the inner process, from the outer one.
#[derive(Debug, clap::Args)]
pub(crate) struct InsideArgs {
    order: String,
}

/// Maximum number of worker threads of a sidecar.
const MAX_WORKERS: u32 = 256;
/// Maximum of a duration on the command line: a year.
const MAX_DURATION: Duration = Duration::from_secs(365 * 24 * 3600);

/// Parses a duration such as `30s`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let units = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let parsed = units.iter().find_map(|(unit, seconds)| {
        let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
        Duration::try_from_secs_f64(number * seconds).ok().filter(|time| *time <= MAX_DURATION)
    });
    parsed.ok_or_else(|| format!("{text:?} is not a duration such as 30s, 5m or 500ms"))
}

fn concurrency(text: &str) -> Result<NonZeroU32, String> {
    let number = text.parse().ok().filter(|number: &NonZeroU32| number.get() <= MAX_WORKERS);
    number.ok_or_else(|| format!("write a number of worker threads from 1 to {MAX_WORKERS}"))
}

fn envoy(text: &str) -> Result<(String, PathBuf), String> {
    let parts = text.split_once('=').filter(|(workload, _)| workload.contains('/'));
    let (workload, file) = parts.ok_or("expected NAMESPACE/WORKLOAD=PROGRAM")?;
    let file = program(file)?.canonicalize().map_err(|error| format!("{file}: {error}"))?;
    Ok((workload.to_owned(), file))
}

fn image(text: &str) -> Result<(String, Vec<String>), String> {
    let (image, command) = text.split_once('=').ok_or("expected IMAGE=COMMAND, such as acme/shop=./shop")?;
    let mut command: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    let first = command.first_mut().ok_or("the command is missing after the =")?;
    let file = program(first)?;
    if first.contains('/') {
        // The container may start in another folder (workingDir).
        let file = std::path::absolute(&file).map_err(|error| format!("{first}: {error}"))?;
        *first = file.to_string_lossy().into_owned();
    }
    Ok((image.to_owned(), command))
}

/// Returns the file of a program, searched as shells do.
fn program(name: &str) -> Result<PathBuf, String> {
    let runs = |file: &Path| {
        fs::metadata(file).is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        let file = PathBuf::from(name);
        return if runs(&file) { Ok(file) } else { Err(format!("{name} is not an executable file")) };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| runs(file));
    found.ok_or_else(|| format!("no program {name} in PATH; for one in this folder write ./{name}"))
}

pub(crate) fn outside(args: UpArgs) -> anyhow::Result<u8> {
    let input = Input::read(args.config.clone())?;
    let name = args.name.clone().unwrap_or_else(|| input.mesh_name());
    let survey = Survey::read(&input.paths, input.text.as_deref())?;
    args.envoys.iter().try_for_each(|(workload, _)| survey.check_envoy(workload))?;
    args.images.iter().try_for_each(|(image, _)| survey.check_image(image))?;
    if let Some(checked) = &survey.checked {
        return validated::report(&name, checked, args.output);
    }
    let capacity = Capacity::of_machine(args.max_pods.map(usize::from), args.plain);
    survey.check_capacity(&capacity)?;
    let published = publish::open(&args.publish, &survey)?;
    isolate::block_signals()?;
    let (folder, _lock) = rundir::create(&name)?;
    let config = input.into_paths(&folder)?;
    published.announce(args.output)?;
    let exe =
        std::env::current_exe().context("cannot find this program's file")?.to_string_lossy().into_owned();
    let own = |words: &[&str]| -> Vec<String> {
        std::iter::once(exe.as_str()).chain(words.iter().copied()).map(str::to_owned).collect()
    };
    let mut images = BTreeMap::from([
        ("skysail/airline".to_owned(), own(&["workload", "airline"])),
        ("skysail/graph".to_owned(), own(&["bench", "graph", "serve"])),
    ]);
    images.extend(args.images);
    let settings = Settings {
        name,
        folder: folder.clone(),
        config,
        images,
        stand_in: own(&["workload", "echo"]),
        control: if args.plain { Vec::new() } else { own(&["control"]) },
        proxy: if args.plain { Vec::new() } else { own(&["proxy"]) },
        runs_commands: args.run_commands,
        max_pods: capacity.pods,
        concurrency: args.concurrency,
        envoys: args.envoys.into_iter().collect(),
        control_arguments: args.control_arguments,
        published: published.targets.clone(),
        egress: args.egress,
    };
    let order = MonitorOrder {
        settings,
        time: args.time,
        output: args.output,
        ready_within: args.ready_within,
        metrics_interval: args.metrics_interval,
    };
    let order = serde_json::to_string(&order)?;
    let inside = ["up-inside".into(), OsString::from(order)];
    let forwarder = args.egress.then(|| ["up-egress".into()]);
    let forwarder = forwarder.as_ref().map(<[OsString; 1]>::as_slice);
    let code = isolate::run_inside(&inside, forwarder, published.serve(folder.clone()))?;
    let logs = folder.join("logs");
    if matches!(code, exit::OK | exit::READER_LEFT) || !logs.exists() {
        rundir::remove(&folder).with_context(|| format!("removing {}", folder.display()))?;
    } else {
        // Keys, tokens and Secrets are removed.
        rundir::keep_logs(&folder).with_context(|| format!("clearing {}", folder.display()))?;
        stdio::print_error(format!("logs are kept in {}", logs.display()));
    }
    Ok(code)
}

pub(crate) fn inside(args: InsideArgs) -> anyhow::Result<u8> {
    let order: MonitorOrder =
        serde_json::from_str(&args.order).context("reading the settings of the outer process")?;
    isolate::install_handlers()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let code = isolate::with_reaper(|| runtime.block_on(monitor(order)))?;
    // This is process 1 of the PID namespace: when it ends, every process in the namespace ends.
    runtime.shutdown_background();
    Ok(code)
}

#[cfg(test)]
mod tests;
