//! Requests for Istio's debug types, which `istioctl` sends over discovery. They ask about the server itself. A stream
//! that begins with such a request carries only such requests. Each request gets one response; there are no
//! subscriptions and no acknowledgements.

use std::fmt;

use skysail_proto::envoy::pb::envoy::service::discovery::v3::DiscoveryResponse;
use tonic::{Request, Status};

use super::{Views, WireRequest};
use crate::grpc::{Requests, ResponseWriter, framed};

/// Maximum number of requests per stream. `istioctl` sends one.
const MAX_REQUESTS: u64 = 16;

/// A request for a debug type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DebugRequest {
    /// Type URL, such as `istio.io/debug/syncz`.
    pub type_url: String,
    /// Subjects, for example the name of a proxy.
    pub names: Vec<String>,
}

impl fmt::Display for DebugRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.type_url)?;
        // A request with more than one name is refused.
        self.names.first().map_or(Ok(()), |name| write!(f, " {name}"))
    }
}

impl DebugRequest {
    /// Returns the request for a debug type, if the type URL is one.
    pub(super) fn of(type_url: &str, names: &[String]) -> Option<Self> {
        let below = type_url.strip_prefix("istio.io/debug");
        let is_debug_type = below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            || type_url == "istio.io/connections";
        is_debug_type.then(|| Self { type_url: type_url.to_owned(), names: names.to_vec() })
    }
}

/// Responds to the requests of a stream, beginning with the first.
pub(super) async fn serve<R: WireRequest>(
    first: DebugRequest,
    views: &impl Views,
    call: &Request<()>,
    requests: &mut Requests<R>,
    responses: &mut ResponseWriter,
) -> Result<(), Status> {
    let mut next = Some(first);
    for number in 1_u64.. {
        let debug_request = match next.take() {
            Some(request) => request,
            None => {
                let Some((request, _)) = requests.next().await? else { return Ok(()) };
                if number > MAX_REQUESTS {
                    break;
                }
                request
                    .debug_request()
                    .ok_or_else(|| Status::invalid_argument("this stream carries only debug types"))?
            }
        };
        let response = views.debug_response(&debug_request, call).await?;
        let response =
            DiscoveryResponse { type_url: debug_request.type_url, nonce: number.to_string(), ..response };
        responses.send(std::iter::once(framed(&response)))?;
        responses.flushed().await?;
    }
    Err(Status::resource_exhausted(format!(
        "a stream carries at most {MAX_REQUESTS} requests for debug types; open another one"
    )))
}
