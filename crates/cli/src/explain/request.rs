//! The request to explain, with curl's options.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use serde::Serialize;
use skysail_http::head::{self, RequestHead, Scheme, Version};
use skysail_proxy::explain::CallerCertificate;

/// Method in reports of connections without a request.
const CONNECTION: &str = "CONNECTION";

/// A request, as given on the command line.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct RequestArgs {
    /// URL: `http://reviews:9080/path`; `https://…` for a client that sends TLS itself. `tcp://db:5432` and
    /// `tls://db:5432` are connections without a request.
    url: String,
    /// Method.
    #[arg(
        short = 'X',
        long = "request",
        visible_alias = "method",
        value_name = "METHOD",
        default_value = "GET"
    )]
    method: String,
    /// Header, `NAME: VALUE`; may be given several times.
    #[arg(short = 'H', long = "header", value_name = "HEADER")]
    headers: Vec<String>,
    /// Certificate (PEM file) of a client that sends TLS itself, followed by the certificates between it and its root.
    #[arg(long, value_name = "FILE")]
    cert: Option<PathBuf>,
    /// The client uses HTTP/2 instead of HTTP/1.1.
    #[arg(long, visible_alias = "http2-prior-knowledge")]
    http2: bool,
}

/// A parsed request.
#[derive(Debug)]
pub(super) struct ParsedRequest {
    /// Host that the client looks up and connects to.
    pub(super) host: String,
    /// Port.
    pub(super) port: u16,
    /// The client sends TLS.
    pub(super) tls: bool,
    /// Certificate of a client that sends TLS.
    pub(super) certificate: Option<CallerCertificate>,
    /// Request; `None` for a connection without one.
    pub(super) head: Option<RequestHead>,
    /// The same for the report.
    pub(super) shown: ShownRequest,
}

/// A request in a report.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ShownRequest {
    method: String,
    url: String,
    headers: Vec<String>,
}

impl ShownRequest {
    /// Returns whether this is a connection without a request.
    pub(super) fn is_connection(&self) -> bool {
        self.method == CONNECTION
    }

    /// Returns the request as a line.
    pub(super) fn line(&self) -> String {
        let headers: String = self.headers.iter().map(|header| format!(" -H '{header}'")).collect();
        format!("{} {}{headers}", self.method, self.url)
    }
}

impl ParsedRequest {
    /// Parses the arguments.
    pub(super) fn new(args: &RequestArgs) -> anyhow::Result<Self> {
        let url = args.url.as_str();
        let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
        let default_port = match scheme.to_ascii_lowercase().as_str() {
            "http" => Some(80),
            "https" => Some(443),
            "tcp" | "tls" => None,
            _ => bail!("{url}: the scheme is {scheme}, expected http, https, tcp or tls"),
        };
        let is = |other: &str| scheme.eq_ignore_ascii_case(other);
        let (tls, is_connection) = (is("https") || is("tls"), is("tcp") || is("tls"));
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, target) = rest.split_at(end);
        let (host, port) = host_and_port(authority, default_port).with_context(|| url.to_owned())?;
        let head = if is_connection { None } else { Some(request_head(args, authority, target)?) };
        let shown = ShownRequest {
            method: if is_connection { CONNECTION.to_owned() } else { args.method.clone() },
            url: args.url.clone(),
            headers: args.headers.clone(),
        };
        let certificate = args.cert.as_deref().map(certificate).transpose()?;
        if certificate.is_some() && !tls {
            bail!("--cert {url}: a client in plain text presents no certificate, use https or tls");
        }
        Ok(Self { host, port, tls, certificate, head, shown })
    }

    /// Returns the host of the request, without its port.
    pub(super) fn authority(&self) -> &str {
        let of_head = self.head.as_ref().map(|head| without_port(head.authority()));
        of_head.unwrap_or(&self.host)
    }
}

fn certificate(path: &Path) -> anyhow::Result<CallerCertificate> {
    let what = || format!("--cert {}", path.display());
    let pem = fs::read(path).with_context(what)?;
    CallerCertificate::from_pem(&pem).with_context(what)
}

/// Returns an authority without its port.
pub(super) fn without_port(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, _)) if !host.contains(':') || host.ends_with(']') => host,
        _ => authority,
    }
}

/// Splits `HOST:PORT`, `[ADDRESS]:PORT` or a host alone.
fn host_and_port(authority: &str, default: Option<u16>) -> anyhow::Result<(String, u16)> {
    if head::as_authority(authority.as_bytes()).is_none() || authority.contains('@') {
        bail!("{authority:?} is not HOST or HOST:PORT");
    }
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
            let port = port.parse().ok().filter(|port| *port > 0);
            (
                host,
                Some(
                    port.with_context(|| format!("{authority:?}: the port is not a number from 1 to 65535"))?,
                ),
            )
        }
        _ => (authority, default),
    };
    if host.is_empty() {
        bail!("the URL has no host");
    }
    let port = port.context("a tcp or tls URL needs a port")?;
    Ok((host.trim_start_matches('[').trim_end_matches(']').to_owned(), port))
}

fn request_head(args: &RequestArgs, authority: &str, target: &str) -> anyhow::Result<RequestHead> {
    if args.method.is_empty() || !args.method.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    {
        bail!("-X {:?} is not a method", args.method);
    }
    let target = target.split('#').next().unwrap_or_default();
    if !target.bytes().all(|byte| byte.is_ascii_graphic()) {
        bail!("{target:?}: the path has characters that need percent encoding");
    }
    let path = if target.starts_with('/') { target.to_owned() } else { format!("/{target}") };
    let mut head = RequestHead::build(&args.method, &path, authority, &[]);
    head.version = if args.http2 { Version::Http2 } else { Version::Http11 };
    if args.url.to_ascii_lowercase().starts_with("https:") {
        head.set_scheme(Scheme::Https);
    }
    for header in &args.headers {
        let (name, value) =
            header.split_once(':').with_context(|| format!("-H {header:?} is not NAME: VALUE"))?;
        let (name, value) = (name.trim().to_ascii_lowercase(), value.trim());
        let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        if name.is_empty() || !name.bytes().all(is_token) {
            bail!("-H {header:?}: {name:?} is not the name of a header");
        }
        if value.bytes().any(|byte| byte.is_ascii_control() && byte != b'\t') {
            bail!("-H {header:?}: the value has control characters");
        }
        match name.as_str() {
            "host" if head::as_authority(value.as_bytes()).is_some() => head.set_authority(value),
            "host" => bail!("-H {header:?}: the value is not HOST or HOST:PORT"),
            _ => head.append(&name, value.as_bytes()),
        }
    }
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str, headers: &[&str]) -> Result<ParsedRequest, String> {
        let args = RequestArgs {
            url: url.to_owned(),
            method: "GET".to_owned(),
            headers: headers.iter().map(|header| (*header).to_owned()).collect(),
            cert: None,
            http2: false,
        };
        ParsedRequest::new(&args).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn urls_are_parsed_as_by_curl() {
        for (url, host, port, path) in [
            ("http://reviews:9080/a?b=c#d", "reviews", 9080, Some("/a?b=c")),
            ("reviews", "reviews", 80, Some("/")),
            ("https://a.example?x", "a.example", 443, Some("/?x")),
            ("tcp://db:5432", "db", 5432, None),
            ("tls://db:5432", "db", 5432, None),
            ("http://10.96.0.1:80/", "10.96.0.1", 80, Some("/")),
            ("http://[::1]:80/", "::1", 80, Some("/")),
        ] {
            let request = parse(url, &[]).unwrap();
            assert_eq!((request.host.as_str(), request.port), (host, port), "{url}");
            assert_eq!(request.head.as_ref().map(RequestHead::path), path, "{url}");
        }
    }

    #[test]
    fn the_host_header_replaces_the_authority_only() {
        let request = parse("http://reviews:9080/", &["Host: shop.example", "X-User: ann"]).unwrap();
        assert_eq!(request.host, "reviews");
        let head = request.head.unwrap();
        assert_eq!((head.authority(), head.header("x-user")), ("shop.example", Some(&b"ann"[..])));
    }

    #[test]
    fn invalid_requests_are_refused_with_the_reason() {
        for (url, headers, reason) in [
            ("ftp://a", &[][..], "expected http, https, tcp or tls"),
            ("http://a:0/", &[], "not a number from 1"),
            ("http://a:b/", &[], "not HOST"),
            ("http:///", &[], "not HOST"),
            ("tcp://db", &[], "needs a port"),
            ("http://a/ b", &[], "percent encoding"),
            ("http://a/", &["x"], "NAME: VALUE"),
            ("http://a/", &["x y: z"], "name of a header"),
            ("http://a/", &["x: \u{1}"], "control"),
            ("http://u@a/", &[], "not HOST"),
        ] {
            let error = parse(url, headers).unwrap_err();
            assert!(error.contains(reason), "{url}: {error}");
        }
    }
}
