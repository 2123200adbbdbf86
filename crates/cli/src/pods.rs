//! `skysail exec`, `logs` and `status`: looking into a mesh that runs.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use skysail_sandbox::{
    enter, http,
    rundir::{self, PodState, State},
};

use crate::view;

/// Arguments of `skysail exec`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: skysail exec booking -- curl -s http://flight:9080/healthz\n\n\
    The command runs in the pod's network, with the pod's names, and its connections take the way the workload's \
    take: through the sidecar. Files are those of this machine. The exit code is the command's.")]
pub(crate) struct ExecArgs {
    /// A workload (its first ready pod is taken) or a pod; NAMESPACE/NAME where the name is not unique.
    workload: String,
    /// The mesh, if several run.
    #[arg(long)]
    name: Option<String>,
    /// The command and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Arguments of `skysail call`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: skysail call booking http://flight:9080/healthz -H 'x-canary: always'\n\n\
    The body is printed, and the status on standard error. The exit code is 0 for a status below 400.")]
pub(crate) struct CallArgs {
    /// A workload (its first ready pod is taken) or a pod; NAMESPACE/NAME where the name is not unique.
    workload: String,
    #[command(flatten)]
    request: Request,
    /// The mesh, if several run.
    #[arg(long)]
    name: Option<String>,
}

/// A request, as typed in.
#[derive(Debug, clap::Args)]
pub(crate) struct Request {
    /// What to ask for, such as `http://flight:9080/healthz`.
    url: String,
    /// The method.
    #[arg(short = 'X', long, default_value = "GET")]
    method: String,
    /// A header, `NAME: VALUE`; may be given several times.
    #[arg(short = 'H', long = "header")]
    headers: Vec<String>,
    /// The body.
    #[arg(short, long)]
    data: Option<String>,
    /// How many times to ask, one after the other.
    #[arg(short = 'n', long, default_value_t = 1)]
    times: u32,
}

/// Arguments of `skysail logs`.
#[derive(Debug, clap::Args)]
pub(crate) struct LogsArgs {
    /// A workload or a pod, or `control` for the control plane.
    workload: String,
    /// Whose log in the pod: a container's name, or `proxy` for the sidecar. All containers if not given.
    #[arg(short, long)]
    container: Option<String>,
    /// Go on printing what is written.
    #[arg(short, long)]
    follow: bool,
    /// The mesh, if several run.
    #[arg(long)]
    name: Option<String>,
}

/// Arguments of `skysail status`.
#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: view::Output,
    /// The mesh, if several run.
    #[arg(long)]
    name: Option<String>,
}

/// A call that takes longer has failed.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// How often a followed log is looked at.
const LOOK: Duration = Duration::from_millis(200);

pub(crate) fn exec(args: &ExecArgs) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    let pods = find(&mesh, &args.workload)?;
    let pod = pods.iter().find(|pod| pod.ready.is_ok()).unwrap_or(&pods[0]);
    Ok(enter::run(&mesh, pod, &args.command)?)
}

/// Runs this program's own small client inside, so that nothing need be installed.
pub(crate) fn call(args: CallArgs) -> anyhow::Result<u8> {
    let exe = std::env::current_exe().context("finding this program's file")?;
    let Request { url, method, headers, data, times } = args.request;
    let mut command: Vec<OsString> = vec![exe.into(), "workload".into(), "get".into(), url.into()];
    command.extend(["-X".into(), method.into(), "-n".into(), times.to_string().into()]);
    command.extend(headers.into_iter().flat_map(|header| ["-H".into(), header.into()]));
    command.extend(data.into_iter().flat_map(|data| ["-d".into(), data.into()]));
    exec(&ExecArgs { workload: args.workload, name: args.name, command })
}

/// Makes the request from where this process is.
pub(crate) fn get(request: Request) -> anyhow::Result<u8> {
    let Request { url, method, headers, data, times } = request;
    let call = http::Call { method, url, headers, body: data };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut failed = false;
    for _ in 0..times {
        let answer = runtime.block_on(http::call(&call, ANSWER_WITHIN));
        let (status, body) = answer.with_context(|| format!("asking for {}", call.url))?;
        println!("{body}");
        eprintln!("{status}");
        failed |= status >= 400;
    }
    Ok(u8::from(failed))
}

pub(crate) fn status(args: &StatusArgs) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    match args.output {
        view::Output::Json => println!("{}", serde_json::to_string_pretty(&mesh)?),
        view::Output::Text => println!("{}", view::pods(&mesh)),
    }
    Ok(u8::from(mesh.pods.iter().any(|pod| pod.ready.is_err())))
}

pub(crate) fn logs(args: &LogsArgs) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    let files = if args.workload == "control" {
        vec![mesh.logs().join("control.log")]
    } else {
        let pods = find(&mesh, &args.workload)?;
        pods.iter().flat_map(|pod| log_files(pod, args.container.as_deref())).collect()
    };
    if files.is_empty() {
        bail!("{} has no container {}", args.workload, args.container.as_deref().unwrap_or_default());
    }
    let mut positions = vec![0; files.len()];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    loop {
        for (file, position) in files.iter().zip(&mut positions) {
            print_from(file, position, files.len() > 1)
                .with_context(|| format!("reading {}", file.display()))?;
        }
        if !args.follow {
            return Ok(0);
        }
        runtime.block_on(async { tokio::time::sleep(LOOK).await });
    }
}

fn find<'a>(mesh: &'a State, name: &str) -> anyhow::Result<Vec<&'a PodState>> {
    let pods = mesh.matching(name);
    let Some(first) = pods.first() else {
        let mut known: Vec<_> =
            mesh.pods.iter().map(|pod| format!("{}/{}", pod.namespace, pod.workload)).collect();
        known.dedup();
        bail!("mesh {} has no workload or pod {name}; it has {}", mesh.name, known.join(", "));
    };
    if pods.iter().any(|pod| pod.namespace != first.namespace) {
        bail!("{name} is in several namespaces: say NAMESPACE/{name}");
    }
    Ok(pods)
}

fn log_files(pod: &PodState, container: Option<&str>) -> Vec<PathBuf> {
    let programs = pod.programs.iter().filter(|program| match container {
        Some(container) => program.name == container,
        None => program.name != "proxy",
    });
    programs.map(|program| pod.logs.join(format!("{}.log", program.name))).collect()
}

/// Prints what a file has beyond a position, under the file's name if it is not the only one.
fn print_from(path: &Path, position: &mut u64, named: bool) -> io::Result<()> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    if length <= *position {
        return Ok(());
    }
    file.seek(SeekFrom::Start(*position))?;
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    *position += text.len() as u64;
    let mut out = io::stdout().lock();
    if named {
        writeln!(out, "==> {}", path.display())?;
    }
    out.write_all(&text)
}
