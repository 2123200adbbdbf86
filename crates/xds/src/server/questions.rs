//! Istio's debug types: questions about the server itself, which `istioctl` sends over discovery. A stream that
//! begins with a question carries only questions. Each request gets one response; there are no subscriptions and no
//! acknowledgements.

use std::fmt;

use skysail_proto::envoy::pb::envoy::service::discovery::v3::DiscoveryResponse;
use tonic::{Request, Status};

use super::{Views, WireRequest};
use crate::grpc::{Answers, Requests, framed};

/// Maximum number of questions per stream. `istioctl` asks one.
const MAX_QUESTIONS: u64 = 16;

/// A question about the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Type URL, such as `istio.io/debug/syncz`.
    pub type_url: String,
    /// Subjects, for example the name of a proxy.
    pub names: Vec<String>,
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.type_url)?;
        // A question with more than one name is not answered.
        self.names.first().map_or(Ok(()), |name| write!(f, " {name}"))
    }
}

impl Question {
    /// Returns the question in a request, if it is one.
    pub(super) fn of(type_url: &str, names: &[String]) -> Option<Self> {
        let below = type_url.strip_prefix("istio.io/debug");
        let is_question = below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            || type_url == "istio.io/connections";
        is_question.then(|| Self { type_url: type_url.to_owned(), names: names.to_vec() })
    }
}

/// Answers the questions of a stream, beginning with the first.
pub(super) async fn answer<R: WireRequest>(
    first: Question,
    views: &impl Views,
    call: &Request<()>,
    requests: &mut Requests<R>,
    answers: &mut Answers,
) -> Result<(), Status> {
    let mut next = Some(first);
    for number in 1..=MAX_QUESTIONS {
        let question = match next.take() {
            Some(question) => question,
            None => {
                let Some((request, _)) = requests.next().await? else { return Ok(()) };
                request
                    .question()
                    .ok_or_else(|| Status::invalid_argument("this stream carries only debug types"))?
            }
        };
        let response = views.answer(&question, call)?;
        let response =
            DiscoveryResponse { type_url: question.type_url, nonce: number.to_string(), ..response };
        answers.send(std::iter::once(framed(&response)))?;
        answers.flushed().await?;
    }
    Err(Status::resource_exhausted(format!(
        "a stream carries at most {MAX_QUESTIONS} questions; open another one"
    )))
}
