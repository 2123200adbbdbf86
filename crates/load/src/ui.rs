//! `skysail load ui`: a page that runs loads and compares results, and Fortio's REST calls for the same.
//!
//! Only callers on this machine are served, and no page of another site, because a caller can make this program send
//! requests to any address.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::Context as _;
use axum::{
    Json, Router,
    extract::{Query, State},
    http::{
        StatusCode,
        header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE},
    },
    middleware,
    response::{IntoResponse, Response},
    routing::get,
};
use clap::Parser as _;
use serde_json::{Value, json};
use skysail_core::{shutdown, stdio};
use tokio::net::TcpListener;

use crate::{
    args::LoadArgs,
    result::{HistogramData, RunResult},
    run,
    target::Target,
    worker::{FOR_BUCKETS, Interval, Shared},
};

/// Maximum number of loads at the same time.
const MAX_RUNNING: usize = 8;
/// Number of ended loads whose results are kept in memory.
const KEPT: usize = 100;
/// Parameters of a run that are flags of the command line. Those with files are missing.
const FLAGS: [&str; 22] = [
    "qps",
    "c",
    "t",
    "n",
    "p",
    "r",
    "H",
    "X",
    "s",
    "payload",
    "payload-size",
    "content-type",
    "timeout",
    "labels",
    "connection-reuse",
    "healthservice",
    "resolve",
    "abort-on",
    "offset",
    "threads",
    "httpbufferkb",
    "server-name",
];
/// Parameters that are switches: `on` or `true`.
const SWITCHES: [(&str, &str); 9] = [
    ("jitter", "--jitter"),
    ("nocatchup", "--nocatchup"),
    ("h2", "--h2"),
    ("grpc", "--grpc"),
    ("ping", "--ping"),
    ("k", "-k"),
    ("http1.0", "--http1.0"),
    ("from-sent", "--from-sent"),
    ("allow-initial-errors", "--allow-initial-errors"),
];

/// Parameters that are flags with `true` or `false`, or `on` or `off` as in Fortio's calls.
const BOOLEANS: [&str; 2] = ["uniform", "keepalive"];

/// Settings of `skysail load ui`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct UiArgs {
    /// Address and port of the page.
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8088")]
    listen: SocketAddr,

    /// Folder of results.
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    data_dir: PathBuf,
}

/// A run by its number.
struct Run {
    shared: Arc<Shared>,
    /// Requests so far, and how many of them failed.
    count: u64,
    failed: u64,
    phase: RunPhase,
}

/// State of a run, and its results so far.
enum RunPhase {
    Running {
        args: Arc<LoadArgs>,
        so_far: Interval,
    },
    Finished(Box<RunResult>),
    /// The run has no result, for this reason.
    Failed(String),
}

struct Ui {
    runs: Mutex<BTreeMap<u64, Run>>,
    data_dir: PathBuf,
}

/// Parameters of a call. Names may be repeated.
type Parameters = Vec<(String, String)>;

#[derive(clap::Parser)]
struct CommandLine {
    #[command(flatten)]
    args: LoadArgs,
}

/// Serves the page until a signal ends the process.
///
/// # Errors
/// The port cannot be opened.
pub(crate) fn serve(args: &UiArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let done = runtime.block_on(async {
        let listener = TcpListener::bind(args.listen).await;
        let listener = listener.with_context(|| format!("cannot listen on {}", args.listen))?;
        stdio::print(format_args!("http://{}/", listener.local_addr()?))?;
        let router = router(args.data_dir.clone());
        tokio::select! {
            signal = shutdown::terminate() => signal.map(|_| ()).map_err(Into::into),
            never = skysail_admin::serve(listener, router) => match never {},
        }
    });
    // Runs that have not ended are not waited for.
    runtime.shutdown_background();
    done
}

/// Returns the page and the calls.
pub(crate) fn router(data_dir: PathBuf) -> Router {
    let ui = Arc::new(Ui { runs: Mutex::default(), data_dir });
    Router::new()
        .route("/", get(page))
        .route("/fortio/", get(page))
        .route("/fortio/rest/run", get(start).post(start))
        .route("/fortio/rest/status", get(status).post(status))
        .route("/fortio/rest/stop", get(stop).post(stop))
        .route("/fortio/data/", get(list))
        .route("/fortio/data/{name}", get(result))
        .layer(middleware::from_fn(skysail_admin::local_only))
        .with_state(ui)
}

async fn page() -> Response {
    let policy =
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'";
    let headers = [(CONTENT_TYPE, "text/html; charset=utf-8"), (CONTENT_SECURITY_POLICY, policy)];
    (headers, include_str!("ui.html")).into_response()
}

/// Starts a run. With `async=on` it returns the number of the run, else its result.
async fn start(State(ui): State<Arc<Ui>>, Query(parameters): Query<Parameters>) -> Response {
    let (args, url) = match arguments(&parameters) {
        Ok((args, url)) => (Arc::new(args), url),
        Err(error) => return failed(StatusCode::BAD_REQUEST, error),
    };
    let (id, shared) = {
        let mut runs = ui.runs();
        if runs.values().filter(|run| run.is_running()).count() >= MAX_RUNNING {
            return failed(StatusCode::TOO_MANY_REQUESTS, format!("{MAX_RUNNING} loads are running"));
        }
        let id = runs.last_key_value().map_or(1, |(last, _)| last + 1);
        let shared = match run::shared(&args, FOR_BUCKETS) {
            Ok(shared) => shared,
            Err(error) => return failed(StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}")),
        };
        runs.insert(id, Run::new(&args, &shared));
        while runs.len() > KEPT + MAX_RUNNING {
            let ended = runs.iter().find(|(_, run)| !run.is_running()).map(|(id, _)| *id);
            ended.and_then(|id| runs.remove(&id));
        }
        (id, shared)
    };
    let saves = is_on(&parameters, "save");
    let of_run = Arc::clone(&ui);
    let task = tokio::task::spawn_blocking(move || {
        let result = Target::of(&args, &url).and_then(|target| run::measure(&args, &target, &shared));
        let result = result.and_then(|mut result| {
            result.run_id = i64::try_from(id).unwrap_or(i64::MAX);
            if saves {
                result.save(&of_run.data_dir)?;
            }
            Ok(result)
        });
        let outcome = result.map_err(|error| format!("{error:#}"));
        if let Some(run) = of_run.runs().get_mut(&id) {
            run.end(outcome.clone());
        }
        outcome
    });
    if is_on(&parameters, "async") {
        return Json(json!({"message": "started", "RunID": id, "Count": 1})).into_response();
    }
    match task.await {
        Ok(Ok(result)) => Json(result).into_response(),
        Ok(Err(error)) => failed(StatusCode::INTERNAL_SERVER_ERROR, error),
        Err(_) => failed(StatusCode::INTERNAL_SERVER_ERROR, "the load panicked".to_owned()),
    }
}

/// Returns the state of one run (`runid`), or of all.
async fn status(State(ui): State<Arc<Ui>>, Query(parameters): Query<Parameters>) -> Response {
    let wanted = run_id(&parameters);
    let mut runs = ui.runs();
    let statuses = runs.iter_mut().filter(|(id, _)| wanted.is_none_or(|wanted| wanted == **id));
    let statuses: serde_json::Map<String, Value> =
        statuses.map(|(id, run)| (id.to_string(), run.status())).collect();
    Json(json!({"Statuses": statuses})).into_response()
}

/// Ends one run (`runid`), or all. Their results contain the requests so far.
async fn stop(State(ui): State<Arc<Ui>>, Query(parameters): Query<Parameters>) -> Response {
    let wanted = run_id(&parameters);
    let runs = ui.runs();
    let running =
        runs.iter().filter(|(id, run)| run.is_running() && wanted.is_none_or(|wanted| wanted == **id));
    let count = running.map(|(_, run)| run.shared.stop()).count();
    Json(json!({"message": "stopping", "Count": count})).into_response()
}

/// Lists the results in the folder.
async fn list(State(ui): State<Arc<Ui>>) -> Response {
    let files = fs::read_dir(&ui.data_dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = files
        .filter_map(|file| file.file_name().into_string().ok())
        .filter_map(|name| Some(name.strip_suffix(".json")?.to_owned()))
        .collect();
    names.sort_unstable_by(|a, b| b.cmp(a));
    Json(names).into_response()
}

/// Returns a result from the folder.
async fn result(
    State(ui): State<Arc<Ui>>,
    axum::extract::Path(name): axum::extract::Path<String>,
) -> Response {
    let name = name.strip_suffix(".json").unwrap_or(&name);
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
        return failed(StatusCode::BAD_REQUEST, "this is not the name of a result".to_owned());
    }
    match read(&ui.data_dir.join(format!("{name}.json"))) {
        Ok(result) => Json(result).into_response(),
        Err(error) => failed(StatusCode::NOT_FOUND, format!("{error:#}")),
    }
}

impl Ui {
    fn runs(&self) -> MutexGuard<'_, BTreeMap<u64, Run>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Run {
    fn new(args: &Arc<LoadArgs>, shared: &Arc<Shared>) -> Self {
        let phase = RunPhase::Running { args: Arc::clone(args), so_far: shared.empty_interval() };
        Self { shared: Arc::clone(shared), count: 0, failed: 0, phase }
    }

    fn is_running(&self) -> bool {
        matches!(self.phase, RunPhase::Running { .. })
    }

    /// Takes what the threads have reported since the last call.
    fn update(&mut self) {
        if let RunPhase::Running { so_far, .. } = &mut self.phase
            && so_far.add(&self.shared.take_interval()).is_ok()
        {
            (self.count, self.failed) = (so_far.latency.len(), so_far.failed);
        }
    }

    fn end(&mut self, outcome: Result<RunResult, String>) {
        self.update();
        self.phase = match outcome {
            Ok(result) => RunPhase::Finished(Box::new(result)),
            Err(error) => RunPhase::Failed(error),
        };
    }

    /// Returns the state: while the run lasts with the latencies so far, later with its result or its error. The cost is
    /// that of the histogram's fixed number of counters, whatever the number of requests.
    fn status(&mut self) -> Value {
        self.update();
        let (state, histogram, result, error) = match &self.phase {
            RunPhase::Running { args, so_far } => {
                ("running", json!(HistogramData::of_times(&so_far.latency, args)), Value::Null, Value::Null)
            }
            RunPhase::Finished(result) => ("finished", Value::Null, json!(result), Value::Null),
            RunPhase::Failed(error) => ("failed", Value::Null, Value::Null, json!(error)),
        };
        json!({
            "State": state, "Count": self.count, "Failed": self.failed, "DurationHistogram": histogram,
            "Result": result, "Error": error,
        })
    }
}

fn read(file: &Path) -> anyhow::Result<RunResult> {
    let text = fs::read_to_string(file).context("there is no such result")?;
    serde_json::from_str(&text).context("the file is not a result")
}

/// Converts parameters to the arguments of the command line, which checks them.
fn arguments(parameters: &Parameters) -> Result<(LoadArgs, String), String> {
    let url = parameters.iter().find(|(name, _)| name == "url").map(|(_, url)| url.clone());
    let url = url.filter(|url| !url.is_empty()).ok_or("the parameter url is missing")?;
    let mut line = vec!["load".to_owned(), "--quiet".to_owned()];
    for (name, value) in parameters.iter().filter(|(_, value)| !value.is_empty()) {
        if let Some((_, flag)) = SWITCHES.iter().find(|(known, _)| known == name) {
            line.extend(matches!(value.as_str(), "on" | "true").then(|| (*flag).to_owned()));
        } else if BOOLEANS.contains(&name.as_str()) {
            let value = match value.as_str() {
                "on" | "true" => true,
                "off" | "false" => false,
                _ => return Err(format!("the parameter {name} is neither on nor off")),
            };
            line.push(format!("--{name}={value}"));
        } else if FLAGS.contains(&name.as_str()) {
            line.push(if name.len() == 1 { format!("-{name}{value}") } else { format!("--{name}={value}") });
        } else if !matches!(name.as_str(), "url" | "async" | "save" | "runid") {
            return Err(format!("the parameter {name} is unknown"));
        }
    }
    line.extend(["--".to_owned(), url.clone()]);
    let args = CommandLine::try_parse_from(line).map_err(|error| error.to_string())?.args;
    args.check().map_err(|error| error.to_string())?;
    Ok((args, url))
}

fn run_id(parameters: &Parameters) -> Option<u64> {
    let (_, value) = parameters.iter().find(|(name, _)| name == "runid")?;
    value.parse().ok().filter(|id| *id > 0)
}

fn is_on(parameters: &Parameters, wanted: &str) -> bool {
    parameters.iter().any(|(name, value)| name == wanted && matches!(value.as_str(), "on" | "true"))
}

fn failed(status: StatusCode, error: String) -> Response {
    (status, Json(json!({"error": error}))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(of: &[(&str, &str)]) -> Parameters {
        of.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn parameters_are_flags_without_files() {
        let given =
            [("url", "http://a/"), ("qps", "5"), ("c", "3"), ("H", "a: b"), ("jitter", "on"), ("n", "")];
        let (args, url) = arguments(&parameters(&given)).unwrap();
        assert_eq!((args.rate(), args.connections, url.as_str()), (Some(5.0), 3, "http://a/"));
        assert_eq!(args.headers, ["a: b"]);
        let given = [("url", "http://a/"), ("uniform", "off"), ("keepalive", "false"), ("threads", "2")];
        let (args, _) = arguments(&parameters(&given)).unwrap();
        assert_eq!((args.recorded().2, args.keepalive, args.threads), (false, false, Some(2)));
        for (name, value) in
            [("payload-file", "/etc/passwd"), ("json", "x"), ("cacert", "x"), ("c", "0"), ("uniform", "1")]
        {
            assert!(arguments(&parameters(&[("url", "http://a/"), (name, value)])).is_err(), "{name}");
        }
        assert!(arguments(&parameters(&[])).is_err());
    }
}
