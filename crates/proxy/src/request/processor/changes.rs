//! Headers and bodies in messages to an external processor, and its changes of them.

use skysail_xds::envoy::pb::envoy::{
    config::core::v3::{HeaderMap, HeaderValue, HeaderValueOption},
    service::ext_proc::v3::{HeaderMutation, body_mutation::Mutation},
};

use super::ProcessorFailure;
use crate::{request::hop::OWN_FIELDS, script::set_pseudo};
use skysail_http::{
    head::{Headers, RequestHead, ResponseHead},
    http1::parse,
};
use skysail_policy::{
    config::processing::{ExternalProcessing, MutationRules},
    matching,
};

/// Maximum size in bytes of a head after a change.
const MAX_HEAD: usize = 64 << 10;

/// The headers that are changed.
pub(crate) enum Head<'h> {
    Request(&'h mut RequestHead),
    Response(&'h mut ResponseHead),
    Trailers(&'h mut Headers),
}

impl Head<'_> {
    fn fields(&mut self) -> &mut Headers {
        match self {
            Self::Request(head) => head,
            Self::Response(head) => head,
            Self::Trailers(fields) => fields,
        }
    }
}

/// Applies a mutation: removals first, as in Envoy. Changes of the proxy's own headers are ignored. Returns the number
/// of changes that the rules do not allow.
///
/// # Errors
/// A change is invalid, or the rules do not allow it and say that this is an error.
pub(crate) fn apply(
    rules: &MutationRules,
    mutation: &HeaderMutation,
    head: &mut Head<'_>,
) -> Result<u64, ProcessorFailure> {
    let mut rejected = 0;
    let mut refuse = |allowed: bool| match allowed {
        false if rules.disallowed_is_error => Err(ProcessorFailure::Invalid("rejected_header_mutation")),
        allowed => {
            rejected += u64::from(!allowed);
            Ok(allowed)
        }
    };
    for name in &mutation.remove_headers {
        let name = name.to_ascii_lowercase();
        if refuse(rules.may_remove(&name))? && !OWN_FIELDS.contains(&&*name) {
            head.fields().remove(&name);
        }
    }
    for option in &mutation.set_headers {
        let Some(header) = &option.header else { continue };
        let name = header.key.to_ascii_lowercase();
        if refuse(rules.may_change(&name))? && !OWN_FIELDS.contains(&&*name) {
            set(head, &name, value(header), is_appended(option))?;
        }
    }
    let fields = head.fields();
    let size: usize = fields.iter().map(|(name, value)| name.len() + value.len()).sum();
    if size > MAX_HEAD { Err(ProcessorFailure::Invalid("headers_too_large")) } else { Ok(rejected) }
}

fn value(header: &HeaderValue) -> &[u8] {
    if header.raw_value.is_empty() { header.value.as_bytes() } else { &header.raw_value }
}

/// Returns whether a value is added to others of its name. As in Envoy, `append_action` has no effect.
#[expect(deprecated, reason = "only this field has an effect")]
fn is_appended(option: &HeaderValueOption) -> bool {
    option.append.is_some_and(|append| append.value)
}

/// Returns whether a response with this status has no content (RFC 9110, section 6.4.1).
fn is_bodiless(status: u16) -> bool {
    matches!(status, 204 | 304)
}

fn set(head: &mut Head<'_>, name: &str, value: &[u8], is_appended: bool) -> Result<(), ProcessorFailure> {
    let invalid = || Err(ProcessorFailure::Invalid("invalid_header_mutation"));
    match (&mut *head, name) {
        (Head::Request(head), name) if name.starts_with(':') || name == "host" => {
            return if set_pseudo(head, name, value) { Ok(()) } else { invalid() };
        }
        (Head::Response(head), ":status") => {
            let status = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
            let Some(status @ 200..=599) = status else { return invalid() };
            // The content of the response would become a part of the next one.
            let has_content = !is_bodiless(head.status()) && head.header("content-length") != Some(b"0");
            if is_bodiless(status) && has_content {
                return invalid();
            }
            head.set_status(status);
            return Ok(());
        }
        _ => {}
    }
    if matches!(head, Head::Trailers(_)) && parse::is_forbidden_in_trailers(name.as_bytes()) {
        return invalid();
    }
    if name.is_empty() || !name.bytes().all(parse::is_token) || !parse::is_field_value(value) {
        return invalid();
    }
    let fields = head.fields();
    if is_appended {
        fields.append(name, value);
    } else {
        fields.set(name, value);
    }
    Ok(())
}

/// Returns a field as the processor gets it: with its value as bytes.
fn field(name: &[u8], value: &[u8]) -> HeaderValue {
    HeaderValue {
        key: String::from_utf8_lossy(name).to_ascii_lowercase(),
        raw_value: value.to_vec(),
        ..HeaderValue::default()
    }
}

/// Returns the new content of a body. The maximum size of an answer bounds it.
pub(crate) fn content(mutation: Option<Mutation>) -> Result<Vec<u8>, ProcessorFailure> {
    match mutation {
        Some(Mutation::Body(content)) => Ok(content),
        Some(Mutation::ClearBody(true)) => Ok(Vec::new()),
        _ => Err(ProcessorFailure::Invalid("unsupported_body_mutation")),
    }
}

/// Returns the fields of a request, with its pseudo-header fields.
pub(crate) fn request_fields(config: &ExternalProcessing, head: &RequestHead) -> HeaderMap {
    let pseudo = [":authority", ":method", ":path", ":scheme"].into_iter().filter_map(|name| {
        let value = head.pseudo_header(name).filter(|value| !value.is_empty())?;
        is_sent(config, name).then(|| field(name.as_bytes(), value.as_bytes()))
    });
    HeaderMap { headers: pseudo.chain(fields(config, head)).collect() }
}

/// Returns the fields of a response, with its status.
pub(crate) fn response_fields(config: &ExternalProcessing, head: &ResponseHead) -> HeaderMap {
    let status = field(b":status", head.status().to_string().as_bytes());
    let status = is_sent(config, ":status").then_some(status);
    HeaderMap { headers: status.into_iter().chain(fields(config, head)).collect() }
}

/// Returns fields as the processor gets them.
pub(crate) fn fields(config: &ExternalProcessing, headers: &Headers) -> Vec<HeaderValue> {
    let all = headers.iter().map(|(name, value)| field(name, value));
    all.filter(|header| is_sent(config, &header.key)).collect()
}

fn is_sent(config: &ExternalProcessing, name: &str) -> bool {
    let any = |tests: &[_]| tests.iter().any(|test| matching::text(test, name.as_bytes()));
    config.allowed_headers.as_deref().is_none_or(any) && !any(&config.disallowed_headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(key: &str, value: &str) -> HeaderMutation {
        let header = HeaderValue { key: key.to_owned(), value: value.to_owned(), ..HeaderValue::default() };
        let option = HeaderValueOption { header: Some(header), ..HeaderValueOption::default() };
        HeaderMutation { set_headers: vec![option], remove_headers: Vec::new() }
    }

    fn set_one(head: &mut Head<'_>, key: &str, value: &str) -> Result<u64, ProcessorFailure> {
        apply(&MutationRules::default(), &one(key, value), head)
    }

    #[test]
    fn changes_cannot_break_the_framing() {
        let mut response = ResponseHead::build(200, &[("content-length", "9")]);
        let mut head = Head::Response(&mut response);
        set_one(&mut head, "Content-Length", "5").unwrap();
        set_one(&mut head, "transfer-encoding", "chunked").unwrap();
        set_one(&mut head, ":status", "404").unwrap();
        for (name, value) in [
            (":status", "204"),
            (":status", "100"),
            (":status", "x"),
            (":path", "/"),
            ("a", "b\r\nc: d"),
            ("a b", "c"),
        ] {
            assert!(set_one(&mut head, name, value).is_err(), "{name} {value}");
        }
        assert!(response.status() == 404 && !response.has("transfer-encoding"));
        assert_eq!(response.header("content-length"), Some(&b"9"[..]));
        let mut empty = ResponseHead::build(200, &[("content-length", "0")]);
        set_one(&mut Head::Response(&mut empty), ":status", "204").unwrap();
        let mut trailers = Headers::default();
        set_one(&mut Head::Trailers(&mut trailers), "authorization", "a").unwrap_err();
        set_one(&mut Head::Trailers(&mut trailers), "x-a", "b").unwrap();
        assert!(trailers.has("x-a"));
        let mut request = RequestHead::build("GET", "/", "a", &[]);
        set_one(&mut Head::Request(&mut request), ":path", "/a b").unwrap_err();
    }
}
