//! HTTP of both versions: every request is answered with a report about it.
//!
//! The path and the query can request errors and delays, for tests of timeouts and retries: `/status/503`, `/delay/2s`,
//! or `?status=503&delay=200ms` on any path.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, request::Parts},
    response::{IntoResponse as _, Response},
};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tracing::info;

use super::{PodIdentity, grpc};

/// Maximum size of a body that the report repeats, in bytes; longer ones are only counted.
const MAX_REPEATED: usize = 16 << 10;
const MAX_DELAY: Duration = Duration::from_secs(3600);

pub(super) async fn answer(State(pod): State<Arc<PodIdentity>>, request: Request<Body>) -> Response {
    let (head, body) = request.into_parts();
    let entry = LogLine::new(&head);
    if grpc::is_call(&head) {
        let (code, answer) = grpc::answer(&head, body);
        entry.answered(answer.status(), Some(code));
        return answer;
    }
    let behavior = Behavior::read(head.uri.path(), head.uri.query().unwrap_or_default());
    let answer = match RequestBody::read(body).await {
        Ok(content) => {
            if let Some(delay) = behavior.delay {
                tokio::time::sleep(delay.min(MAX_DELAY)).await;
            }
            (behavior.status, Json(report(&head, &content, &pod))).into_response()
        }
        Err(error) => (StatusCode::BAD_REQUEST, Json(json!({ "error": error.to_string() }))).into_response(),
    };
    entry.answered(answer.status(), None);
    answer
}

/// Returns the report about a request.
fn report(head: &Parts, content: &RequestBody, pod: &PodIdentity) -> Value {
    let mut headers: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (name, value) in &head.headers {
        let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
        headers.entry(name.as_str()).or_default().push(value);
    }
    let headers: BTreeMap<&str, String> =
        headers.into_iter().map(|(name, values)| (name, values.join(", "))).collect();
    json!({
        "method": head.method.as_str(),
        "path": head.uri.path_and_query().map(ToString::to_string),
        "protocol": format!("{:?}", head.version),
        "headers": headers,
        "body_bytes": content.length,
        "body": content.text(),
        "caller": caller(&head.headers),
        "pod": { "name": pod.name, "namespace": pod.namespace, "ip": pod.ip, "version": pod.version },
    })
}

/// Body of a request: its start and its length in bytes.
#[derive(Default)]
struct RequestBody {
    begin: Vec<u8>,
    length: u64,
}

impl RequestBody {
    async fn read(body: Body) -> Result<Self, axum::Error> {
        let (mut content, mut pieces) = (Self::default(), body.into_data_stream());
        while let Some(piece) = pieces.next().await {
            let piece = piece?;
            content.length += piece.len() as u64;
            let kept = piece.len().min(MAX_REPEATED - content.begin.len());
            content.begin.extend_from_slice(&piece[..kept]);
        }
        Ok(content)
    }

    /// Returns the body if it is text and not too long.
    fn text(&self) -> Option<&str> {
        let is_whole = self.begin.len() as u64 == self.length;
        str::from_utf8(&self.begin).ok().filter(|_| is_whole)
    }
}

/// Log line of a request. It is written when the request is answered, or when the client leaves before that.
struct LogLine {
    method: String,
    host: String,
    path: String,
    protocol: String,
    caller: Option<String>,
    request_id: Option<String>,
    is_written: bool,
}

impl LogLine {
    fn new(head: &Parts) -> Self {
        let text = |name: &str| {
            let value = head.headers.get(name)?;
            Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
        };
        Self {
            method: head.method.to_string(),
            host: head.uri.authority().map(ToString::to_string).or_else(|| text("host")).unwrap_or_default(),
            path: head.uri.path_and_query().map(ToString::to_string).unwrap_or_default(),
            protocol: format!("{:?}", head.version),
            caller: caller(&head.headers),
            request_id: text("x-request-id"),
            is_written: false,
        }
    }

    fn answered(mut self, status: StatusCode, grpc_status: Option<u8>) {
        self.write(Some(status.as_u16()), grpc_status);
    }

    fn write(&mut self, status: Option<u16>, grpc_status: Option<u8>) {
        self.is_written = true;
        let Self { method, host, path, protocol, caller, request_id, .. } = self;
        let outcome = if status.is_some() {
            "answered"
        } else {
            "the client closed the connection before the response"
        };
        let (caller, request_id) = (caller.as_deref(), request_id.as_deref());
        info!(
            method = %method, path = %path, status, grpc_status, caller, request_id, host = %host, protocol = %protocol, "{outcome}"
        );
    }
}

impl Drop for LogLine {
    fn drop(&mut self) {
        if !self.is_written {
            self.write(None, None);
        }
    }
}

/// Status and delay that the request asks for.
#[derive(Debug, PartialEq, Eq)]
struct Behavior {
    status: StatusCode,
    delay: Option<Duration>,
}

impl Behavior {
    fn read(path: &str, query: &str) -> Self {
        let mut behavior = Self { status: StatusCode::OK, delay: None };
        let segments: Vec<&str> = path.split('/').collect();
        for pair in segments.windows(2) {
            behavior.set(pair[0], pair[1]);
        }
        for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            behavior.set(name, value);
        }
        behavior
    }

    fn set(&mut self, name: &str, value: &str) {
        match name {
            // Statuses below 200 are not final.
            "status" => {
                let status = value.parse().ok().filter(|code: &StatusCode| code.as_u16() >= 200);
                self.status = status.unwrap_or(self.status);
            }
            "delay" => self.delay = duration(value).or(self.delay),
            _ => {}
        }
    }
}

/// Parses `200ms`, `2s`, `1.5s` or `2`.
fn duration(text: &str) -> Option<Duration> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 0.001),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    Duration::try_from_secs_f64(number.parse::<f64>().ok()? * unit).ok()
}

/// Returns the caller's identity in `x-forwarded-client-cert`: the URI of the last element, which the pod's sidecar
/// added.
fn caller(headers: &HeaderMap) -> Option<String> {
    let last = headers.get_all("x-forwarded-client-cert").iter().next_back()?;
    let last = String::from_utf8_lossy(last.as_bytes());
    let element = last.rsplit(',').next()?;
    let uri = element.split(';').find_map(|part| part.trim().strip_prefix("URI="))?;
    Some(uri.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_and_delay_are_read_from_path_and_query() {
        let behavior = Behavior::read("/status/503", "delay=200ms");
        assert_eq!(
            behavior,
            Behavior { status: StatusCode::SERVICE_UNAVAILABLE, delay: Some(Duration::from_millis(200)) }
        );
        assert_eq!(Behavior::read("/delay/1.5s", "").delay, Some(Duration::from_millis(1500)));
        let plain = Behavior { status: StatusCode::OK, delay: None };
        for path in ["/", "/status/", "/status/100", "/status/x", "/delay/-1s", "/delay/NaN"] {
            assert_eq!(Behavior::read(path, ""), plain, "{path}");
        }
    }

    #[test]
    fn the_caller_is_the_uri_of_the_last_element() {
        let named = |header: &str| {
            caller(&HeaderMap::from_iter([(
                "x-forwarded-client-cert".parse().unwrap(),
                header.parse().unwrap(),
            )]))
        };
        let header = "By=x;URI=spiffe://a/ns/b/sa/c,By=y;Hash=0;Subject=\"\";URI=spiffe://a/ns/d/sa/e";
        assert_eq!(named(header).as_deref(), Some("spiffe://a/ns/d/sa/e"));
        assert_eq!(named("By=x"), None);
        assert_eq!(caller(&HeaderMap::new()), None);
    }

    #[tokio::test]
    async fn long_bodies_are_counted_and_not_kept() {
        let read = async |length: usize| RequestBody::read(Body::from("x".repeat(length))).await.unwrap();
        let short = read(MAX_REPEATED).await;
        assert_eq!((short.length, short.text().map(str::len)), (MAX_REPEATED as u64, Some(MAX_REPEATED)));
        let long = read(MAX_REPEATED + 1).await;
        assert_eq!(
            (long.length, long.text(), long.begin.len()),
            (MAX_REPEATED as u64 + 1, None, MAX_REPEATED)
        );
    }
}
