//! `skysail exec`, `call`, `logs` and `status`: looking into a mesh that runs.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use skysail_core::stdio;
use skysail_sandbox::{
    Error, enter, http,
    rundir::{self, PodState, State},
};

use crate::{exit, view};

/// Arguments of `skysail exec`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  skysail exec booking -- curl -s http://flight:9080/healthz\n  \
    skysail exec control -- curl -s http://10.244.0.1:15014/debug/syncz\n\n\
    The command runs in the pod's network, with the pod's names, and its connections take the way the workload's \
    take: through the sidecar. Files are those of this machine. The exit code is the command's, 127 if there is no \
    such command, and 126 if it cannot be run.")]
pub(crate) struct ExecArgs {
    /// A workload (its first ready pod is taken) or a pod, NAMESPACE/NAME where the name is not unique; or `control`: where the
    /// control plane runs, and its admin pages are served.
    workload: String,
    /// The mesh's name, if several run.
    #[arg(long)]
    name: Option<String>,
    /// The command and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Arguments of `skysail call`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: skysail call booking http://flight:9080/healthz -H 'x-canary: always'\n\n\
    The body is printed, and the status on standard error. The exit code is 0 for a status below 400, and 1 for any \
    other and where no answer came.")]
pub(crate) struct CallArgs {
    /// A workload (its first ready pod is taken) or a pod, NAMESPACE/NAME where the name is not unique; or `control`: where the
    /// control plane runs, and its admin pages are served.
    workload: String,
    #[command(flatten)]
    request: Request,
    /// The mesh's name, if several run.
    #[arg(long)]
    name: Option<String>,
}

/// A request, as typed in.
#[derive(Debug, clap::Args)]
pub(crate) struct Request {
    /// What to ask for, such as `http://flight:9080/healthz`.
    url: String,
    /// The method [default: GET, with a body POST].
    #[arg(short = 'X', long)]
    method: Option<String>,
    /// A header, `NAME: VALUE`; may be given several times.
    #[arg(short = 'H', long = "header", value_name = "HEADER")]
    headers: Vec<String>,
    /// A body; its content-type is application/x-www-form-urlencoded, as with curl, if no header gives another.
    #[arg(short, long, value_name = "BODY")]
    data: Option<String>,
    /// Speak HTTP/2 from the start rather than HTTP/1.1.
    #[arg(long)]
    http2: bool,
    /// How many times to ask, one after the other.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1)]
    times: u32,
}

/// Arguments of `skysail logs`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples: skysail logs booking, skysail logs booking -c proxy -f, skysail logs control"
)]
pub(crate) struct LogsArgs {
    /// A workload or a pod, or `control` for the control plane.
    workload: String,
    /// Whose log in the pod: a container's name, or `proxy` for the sidecar. All containers if not given.
    #[arg(short, long)]
    container: Option<String>,
    /// Go on printing what is written.
    #[arg(short, long)]
    follow: bool,
    /// The mesh's name, if several run.
    #[arg(long)]
    name: Option<String>,
}

/// Arguments of `skysail status`.
#[derive(Debug, clap::Args)]
#[command(after_help = "The exit code is 0 if all pods are ready, and 1 if not.")]
pub(crate) struct StatusArgs {
    /// How to print it.
    #[arg(short, long, value_enum, default_value_t)]
    output: view::Output,
    /// The mesh's name, if several run.
    #[arg(long)]
    name: Option<String>,
}

/// Stands for the control plane where a workload is named; one of this name is written with its namespace.
const CONTROL: &str = "control";
/// A call that takes longer has failed.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// How often a followed log is looked at.
const LOOK: Duration = Duration::from_millis(200);

pub(crate) fn exec(args: &ExecArgs) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    let ended = if args.workload == CONTROL {
        enter::beside_control(&mesh, &args.command)
    } else {
        let pods = find(&mesh, &args.workload)?;
        let pod = pods.iter().find(|pod| pod.ready.is_ok()).unwrap_or(&pods[0]);
        enter::run(&mesh, pod, &args.command)
    };
    match ended {
        Err(error @ Error::Command { .. }) => {
            stdio::tell(format!("skysail: {error}"));
            let missing =
                matches!(&error, Error::Command { cause, .. } if cause.kind() == io::ErrorKind::NotFound);
            Ok(if missing { exit::NOT_FOUND } else { exit::CANNOT_RUN })
        }
        ended => Ok(ended?),
    }
}

/// Runs this program's own small client inside, so that nothing need be installed.
pub(crate) fn call(args: CallArgs) -> anyhow::Result<u8> {
    let exe = std::env::current_exe().context("finding this program's file")?;
    let Request { url, method, headers, data, http2, times } = args.request;
    let mut command: Vec<OsString> = vec![exe.into(), "workload".into(), "get".into(), url.into()];
    command.extend(["-n".into(), times.to_string().into()]);
    command.extend(method.into_iter().flat_map(|method| ["-X".into(), method.into()]));
    command.extend(headers.into_iter().flat_map(|header| ["-H".into(), header.into()]));
    command.extend(data.into_iter().flat_map(|data| ["-d".into(), data.into()]));
    command.extend(http2.then(|| "--http2".into()));
    exec(&ExecArgs { workload: args.workload, name: args.name, command })
}

/// Makes the request from where this process is.
pub(crate) fn get(request: Request) -> anyhow::Result<u8> {
    let times = request.times;
    let call = request.complete();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut good = true;
    for _ in 0..times {
        match runtime.block_on(http::call(&call, ANSWER_WITHIN)) {
            Ok((status, body)) => {
                stdio::print(body)?;
                stdio::tell(status);
                good &= status < 400;
            }
            // There is no such request.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(error.into()),
            Err(error) => {
                stdio::tell(format!("skysail: asking for {}: {error}", call.url));
                good = false;
            }
        }
    }
    Ok(exit::of(good))
}

impl Request {
    /// With what curl takes for granted where there is a body.
    fn complete(self) -> http::Call {
        let Self { url, method, mut headers, data: body, http2, times: _ } = self;
        let typed = headers.iter().any(|line| line.to_ascii_lowercase().starts_with("content-type:"));
        if body.is_some() && !typed {
            headers.push("content-type: application/x-www-form-urlencoded".to_owned());
        }
        let method = method.unwrap_or_else(|| if body.is_some() { "POST" } else { "GET" }.to_owned());
        http::Call { method, url, headers, body, http2 }
    }
}

pub(crate) fn status(args: &StatusArgs) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    match args.output {
        view::Output::Json => stdio::print(serde_json::to_string_pretty(&view::status(&mesh))?)?,
        view::Output::Text => stdio::print(view::pods(&mesh))?,
    }
    Ok(exit::of(mesh.pods.iter().all(PodState::is_well)))
}

pub(crate) fn logs(args: &LogsArgs) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    let files = if args.workload == CONTROL {
        vec![mesh.logs().join("control.log")]
    } else {
        let pods = find(&mesh, &args.workload)?;
        let files: Vec<_> = pods.iter().flat_map(|pod| log_files(pod, args.container.as_deref())).collect();
        if files.is_empty() {
            let known: Vec<_> = pods[0].programs.iter().map(|program| program.name.as_str()).collect();
            let wanted = args.container.as_deref().unwrap_or("but the sidecar");
            bail!("{} has no container {wanted}; it has {}", args.workload, known.join(", "));
        }
        files
    };
    let mut positions = vec![0; files.len()];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    loop {
        for (file, position) in files.iter().zip(&mut positions) {
            let new = read_from(file, position).with_context(|| format!("reading {}", file.display()))?;
            if !new.is_empty() && files.len() > 1 {
                stdio::print(format_args!("==> {}", file.display()))?;
            }
            stdio::write(&new)?;
        }
        if !args.follow {
            return Ok(exit::OK);
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

/// What a file has beyond a position, which moves on.
fn read_from(path: &Path, position: &mut u64) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(*position))?;
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    *position += text.len() as u64;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_posted_as_a_form_unless_said_otherwise() {
        let request = |method: Option<&str>, headers: &[&str], data: Option<&str>| {
            let text = |text: &str| text.to_owned();
            let headers = headers.iter().copied().map(text).collect();
            let url = "http://a/".to_owned();
            let call = Request {
                url,
                method: method.map(text),
                headers,
                data: data.map(text),
                http2: false,
                times: 1,
            }
            .complete();
            (call.method, call.headers.join(", "))
        };
        let form = "content-type: application/x-www-form-urlencoded";
        for (given, method, headers) in [
            (request(None, &[], None), "GET", ""),
            (request(None, &[], Some("a=b")), "POST", form),
            (request(Some("PUT"), &[], Some("")), "PUT", form),
            (request(None, &["Content-Type: text/plain"], Some("x")), "POST", "Content-Type: text/plain"),
            (request(Some("DELETE"), &["a: b"], None), "DELETE", "a: b"),
        ] {
            assert_eq!(given, (method.to_owned(), headers.to_owned()));
        }
    }
}
