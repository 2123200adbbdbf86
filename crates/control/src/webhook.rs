//! The webhooks for sidecar injection and for validation: HTTPS with the control plane's own certificate. The API server of
//! the cluster calls them for each object that its webhook configurations select.
//!
//! Any client may connect, as API servers usually present no certificate. An answer contains the settings of sidecars and
//! the request itself, but no secret. Limits keep clients from exhausting the control plane.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Extension, Router,
    body::{Body, Bytes, HttpBody as _},
    extract::{DefaultBodyLimit, State},
    http::{Request, StatusCode, Uri},
    response::{IntoResponse as _, Response},
    routing::post,
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use skysail_core::{
    connections::{Connections, Limits},
    descriptors,
};
use skysail_inject::{Settings, review};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt as _;
use tracing::{debug, warn};

use crate::validation;

/// Maximum length of a request's body in bytes. The API server accepts objects of up to 3 MiB.
const MAX_BODY: usize = 8 << 20;
/// Maximum length of a body that is read beside any number of others. Pods are shorter.
const SMALL_BODY: u64 = 64 << 10;
/// Maximum number of connections with longer bodies, until their answers are written.
const LONG_BODIES: usize = 8;
/// Maximum number of requests that are answered at the same time. One continues after its client has left.
const ANSWERS: usize = 2;
/// Timeout of a TLS handshake, of a request's head, and of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum duration of a connection, which has one request. A client that does not read its answer holds memory for as long.
const LIFETIME: Duration = Duration::from_secs(30);
/// Limits of connections.
const LIMITS: Limits = Limits { total: 256, by_address: Some(64), by_identity: None, evictable: 128 };
/// Pause after `accept` has failed.
const RETRY: Duration = Duration::from_millis(100);
/// Path of the webhook for validation.
const VALIDATE: &str = "/validate";
/// Maximum length of a head in bytes.
const MAX_HEAD: usize = 64 << 10;

/// Permit for a long body, which ends with the connection.
#[derive(Clone, Default)]
struct HeldPermit(Arc<Mutex<Option<OwnedSemaphorePermit>>>);

/// What all requests share.
struct Webhook {
    settings: Settings,
    long_bodies: Arc<Semaphore>,
    answers: Arc<Semaphore>,
    /// Permit of a validation. It does not delay injection, also if an object has many costly expressions.
    validation: Arc<Semaphore>,
}

/// Serves the webhook; never returns.
pub(crate) async fn serve(listener: TcpListener, tls: Arc<ServerConfig>, settings: Settings) -> Infallible {
    let (long_bodies, answers) = (Arc::new(Semaphore::new(LONG_BODIES)), Arc::new(Semaphore::new(ANSWERS)));
    let validation = Arc::new(Semaphore::new(1));
    let webhook = Arc::new(Webhook { settings, long_bodies, answers, validation });
    let router = Router::new()
        .route("/inject", post(admit))
        .route("/inject/{*parameters}", post(admit))
        .route(VALIDATE, post(admit))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(webhook);
    let acceptor = TlsAcceptor::from(tls);
    let connections = Connections::new(LIMITS);
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "cannot accept a connection to the webhook");
                tokio::time::sleep(RETRY).await;
                continue;
            }
        };
        let Some(admitted) = connections.admit(from.ip(), descriptors::is_reserved(&stream)) else {
            continue;
        };
        let (acceptor, router) = (acceptor.clone(), router.clone());
        tokio::spawn(async move {
            tokio::select! {
                _ = timeout(LIFETIME, connection(stream, acceptor, router)) => {}
                () = admitted.shed() => debug!(%from, "connection to the webhook closed in favour of another"),
            }
        });
    }
}

async fn connection(stream: TcpStream, acceptor: TlsAcceptor, router: Router) {
    let stream = match timeout(TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            debug!(%error, "TLS handshake of the webhook failed; check caBundle of its configuration");
            return;
        }
        Err(_) => return,
    };
    let held = HeldPermit::default();
    let answer = |mut request: Request<Incoming>| {
        let router = router.clone();
        request.extensions_mut().insert(held.clone());
        async move {
            let answered = timeout(TIMEOUT, router.oneshot(request.map(Body::new))).await;
            Ok::<Response, Infallible>(match answered {
                Ok(Ok(response)) => response,
                Err(_) => StatusCode::REQUEST_TIMEOUT.into_response(),
            })
        }
    };
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(TIMEOUT)
        .keep_alive(false)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service_fn(answer));
    if let Err(error) = served.await {
        debug!(%error, "a connection to the webhook ended");
    }
}

/// Answers an AdmissionReview.
async fn admit(
    State(webhook): State<Arc<Webhook>>,
    Extension(held): Extension<HeldPermit>,
    uri: Uri,
    request: Request<Body>,
) -> Response {
    // A client that sends its body slowly does not delay the others, unless both bodies are long.
    let is_small = request.body().size_hint().exact().is_some_and(|length| length <= SMALL_BODY);
    if !is_small {
        let permit = Arc::clone(&webhook.long_bodies).acquire_owned().await.ok();
        *held.0.lock().unwrap_or_else(PoisonError::into_inner) = permit;
    }
    let body = match axum::body::to_bytes(request.into_body(), MAX_BODY).await {
        Ok(body) => body,
        Err(_) => return (StatusCode::PAYLOAD_TOO_LARGE, "the body is too large\n").into_response(),
    };
    let permits = if uri.path() == VALIDATE { &webhook.validation } else { &webhook.answers };
    let Ok(answering) = Arc::clone(permits).acquire_owned().await else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    let shared = Arc::clone(&webhook);
    let answered = tokio::task::spawn_blocking(move || {
        let _answering = answering;
        answer(&shared, &uri, &body)
    });
    answered.await.unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

fn answer(webhook: &Webhook, uri: &Uri, body: &Bytes) -> Response {
    let answer = match uri.path() {
        VALIDATE => validation::review(body),
        path => review(body, path, &webhook.settings),
    };
    match answer {
        Ok(answer) => axum::Json(answer).into_response(),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}
