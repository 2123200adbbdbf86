//! The index page: a list of all pages, as text for terminals and with links for browsers.

use std::fmt::Write as _;

use axum::{
    http::{
        HeaderMap,
        header::{ACCEPT, CONTENT_SECURITY_POLICY, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
};

const STYLE: &str = "body{font-family:sans-serif;margin:2em}td{padding:.2em 1em .2em 0;vertical-align:top}";
/// Prefix of the description of a page that accepts only POST. Such a page gets no link, because a link sends
/// GET.
const POST: &str = "(POST)";

/// Returns the list of pages. Each line of `pages` is a path, spaces and a description. Clients that accept HTML get
/// links.
pub fn index(program: &str, pages: &'static str, headers: &HeaderMap) -> Response {
    let accept = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    if !accept.into_iter().any(|value| value.contains("text/html")) {
        return pages.into_response();
    }
    let policy = "default-src 'none'; style-src 'unsafe-inline'";
    let headers = [(CONTENT_TYPE, "text/html; charset=utf-8"), (CONTENT_SECURITY_POLICY, policy)];
    (headers, html(program, pages)).into_response()
}

fn html(program: &str, pages: &str) -> String {
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{program}</title><style>{STYLE}</style></head>\n\
         <body><h1>{program}</h1>\n<table>\n"
    );
    for line in pages.lines() {
        let (path, description) = line.split_once(' ').unwrap_or((line, ""));
        let [path, description] = [path, description.trim()].map(escaped);
        let path = match description.starts_with(POST) {
            true => path,
            false => format!("<a href=\"{path}\">{path}</a>"),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(html, "<tr><td>{path}</td><td>{description}</td></tr>");
    }
    html + "</table></body></html>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::{body::to_bytes, http::HeaderValue};

    const PAGES: &str = "/certs   certificates (?a=<b>&c)\n/quit    (POST) end\n";

    async fn page(accept: Option<&'static str>) -> String {
        let accept = accept.map(|accept| (ACCEPT, HeaderValue::from_static(accept)));
        let page = index("skysail-proxy", PAGES, &HeaderMap::from_iter(accept));
        let kind = page.headers()[CONTENT_TYPE].to_str().unwrap().to_owned();
        let body = to_bytes(page.into_body(), 10_000).await.unwrap();
        format!("{kind}\n{}", str::from_utf8(&body).unwrap())
    }

    #[tokio::test]
    async fn browsers_get_links_and_others_text() {
        for accept in [None, Some("*/*"), Some("application/json")] {
            assert_eq!(page(accept).await, format!("text/plain; charset=utf-8\n{PAGES}"));
        }
        let page = page(Some("text/html,application/xhtml+xml,*/*;q=0.8")).await;
        assert!(page.starts_with("text/html; charset=utf-8\n<!DOCTYPE html>"), "{page}");
        for row in [
            "<tr><td><a href=\"/certs\">/certs</a></td><td>certificates (?a=&lt;b&gt;&amp;c)</td></tr>",
            "<tr><td>/quit</td><td>(POST) end</td></tr>",
        ] {
            assert!(page.contains(row), "{page}");
        }
    }
}
