//! Control planes that share Secrets: a server with the API for Secrets delays, refuses and loses requests, and all
//! states that are used form one sequence.

use std::collections::BTreeMap;

use axum::{
    Json, Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use skysail_identity::rotation::secret;
use skysail_kubernetes::ApiServer;

use super::*;

const HOUR: Duration = Duration::from_secs(3600);
const LIFETIMES: Lifetimes = Lifetimes { certificate: HOUR, root: Duration::from_secs(1000 * 3600) };

/// An API server for Secrets.
struct Fake {
    secrets: BTreeMap<String, Value>,
    version: u64,
    /// All versions of the self-signed authority.
    history: Vec<SelfSigned>,
    created: usize,
    random: fastrand::Rng,
    /// Status of all responses, if requests have no effect, and the number of such responses.
    refusal: Option<u16>,
    refused: usize,
    /// Whether some requests fail, before or after their effect.
    is_unreliable: bool,
}

type Shared = Arc<Mutex<Fake>>;

impl Fake {
    async fn start(seed: u64) -> (Shared, ApiServer) {
        let fake = Self {
            secrets: BTreeMap::new(),
            version: 0,
            history: Vec::new(),
            created: 0,
            random: fastrand::Rng::with_seed(seed),
            refusal: None,
            refused: 0,
            is_unreliable: false,
        };
        let shared = Arc::new(Mutex::new(fake));
        let router = Router::new()
            .route("/api/v1/namespaces/mesh/secrets", post(create))
            .route("/api/v1/namespaces/mesh/secrets/{name}", get(read).put(replace))
            .with_state(Arc::clone(&shared));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async { axum::serve(listener, router).await });
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kubeconfig");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "a",
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            "clusters": [{"name": "a", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "a", "user": {}}],
        });
        std::fs::write(&file, config.to_string()).unwrap();
        (shared, ApiServer::new(Some(&file)).await.unwrap())
    }

    fn store(&mut self, name: &str, mut secret: Value) -> Value {
        self.version += 1;
        secret["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.secrets.insert(name.to_owned(), secret.clone());
        if name == secret::NAME {
            let data = values(&secret);
            let get = |key: &str| data.get(key).map(Vec::as_slice);
            self.history.push(SelfSigned::from_secret(get, LIFETIMES, SystemTime::now()).unwrap().0);
        }
        secret
    }

    /// Returns a failure in place of a request or of its response.
    fn failure(&mut self) -> Option<Response> {
        self.refused += usize::from(self.refusal.is_some());
        let is_failure = self.is_unreliable && self.random.u8(..8) == 0;
        self.refusal.or(is_failure.then_some(503)).map(|code| status(code, "a fault"))
    }
}

fn values(secret: &Value) -> BTreeMap<String, Vec<u8>> {
    let data = secret["data"].as_object().unwrap();
    let decode = |value: &Value| STANDARD.decode(value.as_str().unwrap()).unwrap();
    data.iter().map(|(key, value)| (key.clone(), decode(value))).collect()
}

fn status(code: u16, message: &str) -> Response {
    // Only this reason says that there is no such Secret.
    let reason = if code == 404 { "NotFound" } else { "" };
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason, "code": code,
    });
    (StatusCode::from_u16(code).unwrap(), Json(body)).into_response()
}

/// Answers a request, with other requests before and after its effect.
async fn answer(shared: Shared, effect: impl FnOnce(&mut Fake) -> Response) -> Response {
    let pause = |fake: &Shared| fake.lock().unwrap().random.u8(..6);
    for _ in 0..pause(&shared) {
        tokio::task::yield_now().await;
    }
    let response = {
        let mut fake = shared.lock().unwrap();
        if let Some(failure) = fake.failure() {
            return failure;
        }
        effect(&mut fake)
    };
    for _ in 0..pause(&shared) {
        tokio::task::yield_now().await;
    }
    let lost = shared.lock().unwrap().failure();
    lost.unwrap_or(response)
}

async fn read(State(shared): State<Shared>, Path(name): Path<String>) -> Response {
    answer(shared, |fake| match fake.secrets.get(&name) {
        Some(secret) => Json(secret.clone()).into_response(),
        None => status(404, "not found"),
    })
    .await
}

async fn create(State(shared): State<Shared>, Json(secret): Json<Value>) -> Response {
    answer(shared, |fake| {
        let name = secret["metadata"]["name"].as_str().unwrap().to_owned();
        if fake.secrets.contains_key(&name) {
            return status(409, "already exists");
        }
        fake.created += 1;
        Json(fake.store(&name, secret)).into_response()
    })
    .await
}

async fn replace(
    State(shared): State<Shared>,
    Path(name): Path<String>,
    Json(secret): Json<Value>,
) -> Response {
    answer(shared, |fake| match fake.secrets.get(&name) {
        None => status(404, "not found"),
        Some(known) if known["metadata"]["resourceVersion"] != secret["metadata"]["resourceVersion"] => {
            status(409, "conflict")
        }
        Some(_) => Json(fake.store(&name, secret)).into_response(),
    })
    .await
}

async fn open(server: &ApiServer) -> anyhow::Result<AuthorityManager> {
    AuthorityManager::open_in_cluster(server.secrets("mesh"), LIFETIMES).await
}

/// Returns the index of the state in use in the sequence of stored states.
fn place(manager: &AuthorityManager, shared: &Shared) -> usize {
    let Held::SelfSigned(used) = manager.used().held.clone() else { panic!("a plugged-in authority") };
    let roots = used.authority().unwrap().roots_pem().to_owned();
    assert_eq!(manager.current().roots_pem(), roots);
    let stored = shared.lock().unwrap().history.iter().position(|stored| *stored == used);
    stored.expect("a state that was never stored is used")
}

/// Runs a control plane that starts rotations and goes through their steps at random.
async fn replica(shared: Shared, server: ApiServer, seed: u64) -> AuthorityManager {
    let mut random = fastrand::Rng::with_seed(seed);
    let manager = open(&server).await.unwrap();
    let mut last = place(&manager, &shared);
    for _ in 0..12 {
        let due = |used: &SelfSigned| match used.step() {
            Step::Settled => used.rotated(SystemTime::now()),
            _ => used.advanced(used.until()),
        };
        // A failed change leaves the state in use.
        let _ = if random.bool() { manager.change(due).await } else { manager.change(|_| Ok(None)).await };
        let now = place(&manager, &shared);
        assert!(last <= now, "the state of an earlier version is used again");
        last = now;
    }
    manager
}

#[tokio::test]
async fn states_that_control_planes_use_form_one_sequence() {
    for seed in 0..5 {
        let (shared, server) = Fake::start(seed).await;
        shared.lock().unwrap().is_unreliable = true;
        let start = |number| tokio::spawn(replica(Arc::clone(&shared), server.clone(), seed * 10 + number));
        let mut managers = Vec::new();
        for started in [1, 2, 3].map(start) {
            managers.push(started.await.unwrap());
        }
        shared.lock().unwrap().is_unreliable = false;
        for manager in &managers {
            manager.change(|_| Ok(None)).await.unwrap();
            let last = place(manager, &shared);
            let fake = shared.lock().unwrap();
            assert!(fake.history[last] == *fake.history.last().unwrap());
        }
        let fake = shared.lock().unwrap();
        assert_eq!(fake.created, 1, "seed {seed}");
        for (before, after) in fake.history.iter().zip(&fake.history[1..]) {
            let (old, new) = (before.authority().unwrap(), after.authority().unwrap());
            let signer = &new.described()[0].serial;
            assert!(old.described().iter().any(|root| root.serial == *signer), "seed {seed}: it was trusted");
            let following = Step::ALL.iter().cycle().skip_while(|step| **step != before.step()).nth(1);
            assert_eq!(Some(&after.step()), following, "seed {seed}");
        }
    }
}

#[tokio::test]
async fn a_refusing_api_server_gets_no_second_authority() {
    let (shared, server) = Fake::start(1).await;
    for code in [401, 403] {
        shared.lock().unwrap().refusal = Some(code);
        let refused = format!("{:#}", open(&server).await.err().unwrap());
        assert!(refused.starts_with("Secret mesh/cacerts cannot be read: "), "{refused}");
        assert!(refused.contains("needs get, list, watch, create and update for Secrets"), "{refused}");
    }
    shared.lock().unwrap().refusal = None;
    let first = open(&server).await.unwrap();
    let roots = first.current().roots_pem().to_owned();
    for code in [403, 500] {
        shared.lock().unwrap().refusal = Some(code);
        let error = first.change(|used| used.rotated(SystemTime::now())).await.err();
        first.used().report(error);
        assert!(first.status().problem.unwrap().contains("Secret mesh/cacerts cannot be read: "));
        assert_eq!((first.current().roots_pem(), first.status().step), (&*roots, Step::Settled));
    }
    // A start waits while the API server is away.
    shared.lock().unwrap().refusal = Some(503);
    shared.lock().unwrap().refused = 0;
    let second = tokio::spawn({
        let server = server.clone();
        async move { open(&server).await }
    });
    while shared.lock().unwrap().refused == 0 {
        tokio::task::yield_now().await;
    }
    shared.lock().unwrap().refusal = None;
    assert_eq!(second.await.unwrap().unwrap().current().roots_pem(), roots);
    assert_eq!(shared.lock().unwrap().created, 1);
}

#[tokio::test]
async fn a_deleted_secret_is_written_again_and_a_later_plugged_in_authority_is_used() {
    let (shared, server) = Fake::start(1).await;
    let manager = open(&server).await.unwrap();
    let roots = manager.current().roots_pem().to_owned();
    shared.lock().unwrap().secrets.clear();
    manager.change(|_| Ok(None)).await.unwrap();
    assert_eq!(open(&server).await.unwrap().current().roots_pem(), roots);

    let other = SelfSigned::create(LIFETIMES, SystemTime::now()).unwrap();
    let data: BTreeMap<_, _> =
        other.to_secret().unwrap().into_iter().map(|(key, value)| (key, STANDARD.encode(value))).collect();
    let plugged_in =
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "cacerts"}, "data": data});
    let mut incomplete = plugged_in.clone();
    incomplete["data"].as_object_mut().unwrap().remove("ca-key.pem");
    shared.lock().unwrap().store("cacerts", incomplete);
    let refused = format!("{:#}", manager.change(|_| Ok(None)).await.err().unwrap());
    assert!(refused.starts_with("Secret mesh/cacerts: ca-key.pem: there is no such file"), "{refused}");
    assert!(open(&server).await.is_err());
    assert_eq!(manager.current().roots_pem(), roots);

    shared.lock().unwrap().store("cacerts", plugged_in);
    manager.change(|_| Ok(None)).await.unwrap();
    assert_eq!(manager.current().roots_pem(), other.authority().unwrap().roots_pem());
    let refused = manager.rotate().await.unwrap_err();
    assert!(refused.contains("in Secret mesh/cacerts, add the new root"), "{refused}");
    shared.lock().unwrap().secrets.remove("cacerts");
    let refused = manager.change(|_| Ok(None)).await.err().unwrap().to_string();
    assert!(refused.starts_with("Secret mesh/cacerts is gone"), "{refused}");
    assert_eq!(manager.current().roots_pem(), other.authority().unwrap().roots_pem());
}
