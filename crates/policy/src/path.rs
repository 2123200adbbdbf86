//! Path normalisation. It runs before any decision, so that policies and routes see the path that the upstream sees.
//!
//! The order is Envoy's: escaped slashes, RFC 3986 (dot segments, backslashes, needless escapes), adjacent slashes.
//! The query is unchanged. Nearly all paths are already in normal form, which one scan detects.

use crate::{
    config::http::{EscapedSlashes, HttpManager},
    matching,
};
use skysail_http::head::RequestHead;

/// Result of a normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normalization {
    /// The request continues with the path in the head.
    Continue,
    /// 400, [`crate::error::Kind::BadPath`].
    Reject,
    /// 307 with the path in the head: [`location`].
    Redirect,
}

/// Normalises a request's path by the settings of the connection manager.
pub fn normalize(manager: &HttpManager, head: &mut RequestHead) -> Normalization {
    let original = head.path();
    if is_plain(original.as_bytes()) {
        return Normalization::Continue;
    }
    if original.contains('#') {
        return Normalization::Reject;
    }
    // `*` and the empty path of CONNECT have no segments.
    if !original.starts_with('/') {
        return Normalization::Continue;
    }
    let (path, query) = original.split_at(original.find('?').unwrap_or(original.len()));
    let mut outcome = Normalization::Continue;
    let mut new: Option<String> = None;
    if manager.escaped_slashes != EscapedSlashes::Keep {
        new = unescape_slashes(path);
    }
    if let Some(unescaped) = &new {
        outcome = match manager.escaped_slashes {
            EscapedSlashes::Reject => {
                let unescaped = format!("{unescaped}{query}");
                head.set_path(&unescaped);
                return Normalization::Reject;
            }
            EscapedSlashes::UnescapeAndRedirect if matching::is_grpc(head) => Normalization::Reject,
            EscapedSlashes::UnescapeAndRedirect => Normalization::Redirect,
            _ => Normalization::Continue,
        };
    }
    if manager.normalize_path && !is_canonical(new.as_deref().unwrap_or(path)) {
        match canonical(new.as_deref().unwrap_or(path)) {
            Some(path) => new = Some(path),
            None => outcome = Normalization::Reject,
        }
    }
    if manager.merge_slashes && new.as_deref().unwrap_or(path).contains("//") {
        new = Some(merge_slashes(new.as_deref().unwrap_or(path)));
    }
    // The path of a refused request is normalised, too, for routes and logs.
    if let Some(mut new) = new {
        new.push_str(query);
        head.set_path(&new);
    }
    outcome
}

/// Returns whether normalisation cannot change a target. One scan; most targets are such.
fn is_plain(target: &[u8]) -> bool {
    let mut before = 0;
    for (at, byte) in target.iter().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => {}
            b'.' | b'/' if before != b'/' => {}
            b'?' => return !target[at..].contains(&b'#'),
            _ => return false,
        }
        before = *byte;
    }
    true
}

/// Returns the location of a redirect: the normalised path, as in Envoy. A path with two leading slashes would be read
/// as another host (RFC 3986, section 4.2). A dot segment in front of them prevents that.
pub fn location(head: &RequestHead) -> String {
    let path = head.path();
    let dot = if path.starts_with("//") || path.starts_with("/\\") { "/." } else { "" };
    format!("{dot}{path}")
}

/// Decodes `%2F` and `%5C`; returns `None` if there is none.
fn unescape_slashes(path: &str) -> Option<String> {
    let mut new = String::new();
    let mut rest = path;
    while let Some(at) = rest.find('%') {
        let (before, escape) = rest.split_at(at);
        new.push_str(before);
        let (c, len) = match escape.as_bytes().get(1..3) {
            Some([b'2', b'f' | b'F']) => ('/', 3),
            Some([b'5', b'c' | b'C']) => ('\\', 3),
            _ => ('%', 1),
        };
        new.push(c);
        rest = &escape[len..];
    }
    new.push_str(rest);
    (new.len() != path.len()).then_some(new)
}

/// Returns true only if [`canonical`] would change nothing. May return false even then.
fn is_canonical(path: &str) -> bool {
    !path.contains("/.") && path.bytes().all(|b| b != b'%' && b != b'\\' && !needs_escape(b))
}

/// Normalises by RFC 3986, section 6.2.2: needless escapes are decoded, dot segments resolved. A backslash is a slash,
/// as in browsers. Returns `None` for an escaped NUL, which servers treat differently.
fn canonical(path: &str) -> Option<String> {
    let mut new: Vec<u8> = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    let mut in_parameters = false;
    while let [byte, after @ ..] = rest {
        rest = after;
        match *byte {
            // The parameters of a dot segment end at the next slash, as in Envoy, and are removed with it.
            b'\\' if in_parameters => new.push(b'\\'),
            b'/' | b'\\' => {
                in_parameters = false;
                end_segment(&mut new);
            }
            b';' => {
                in_parameters |= new.ends_with(b"/.") || new.ends_with(b"/..");
                new.push(b';');
            }
            b'%' => match escaped(rest) {
                Some(0) => return None,
                Some(plain) if is_unreserved(plain) && !completes_escape(&new, plain) => {
                    rest = &rest[2..];
                    new.push(plain);
                }
                _ => new.push(b'%'),
            },
            byte if needs_escape(byte) => new.extend_from_slice(format!("%{byte:02X}").as_bytes()),
            byte => new.push(byte),
        }
    }
    resolve_last(&mut new);
    String::from_utf8(new).ok()
}

/// Returns whether a digit would complete an escape after a stray percent sign. `%%32e` must not become `%2e`, which
/// the upstream may decode to a dot that this proxy has not seen.
fn completes_escape(path: &[u8], digit: u8) -> bool {
    let stray = match path {
        [.., b'%'] => true,
        [.., b'%', first] => first.is_ascii_hexdigit(),
        _ => false,
    };
    stray && digit.is_ascii_hexdigit()
}

/// Ends a segment with a slash; resolves a dot segment.
fn end_segment(path: &mut Vec<u8>) {
    if !resolve_last(path) {
        path.push(b'/');
    }
}

/// Returns the part after the last slash.
fn last_segment(path: &[u8]) -> &[u8] {
    memchr::memrchr(b'/', path).map_or(path, |slash| &path[slash + 1..])
}

/// Returns whether a dot segment, with or without parameters, removes its parent; `None` if it is no dot segment.
fn goes_up(segment: &[u8]) -> Option<bool> {
    match segment {
        b"." | [b'.', b';', ..] => Some(false),
        b".." | [b'.', b'.', b';', ..] => Some(true),
        _ => None,
    }
}

/// Resolves a dot segment at the end of the path, which then ends in a slash. Returns whether there was one.
/// Parameters (`..;a=b`) do not prevent it, because servers that know them remove them first.
fn resolve_last(path: &mut Vec<u8>) -> bool {
    let segment = last_segment(path);
    let (start, Some(up)) = (path.len() - segment.len(), goes_up(segment)) else { return false };
    if start == 0 {
        return false;
    }
    path.truncate(start);
    if !up {
        return true;
    }
    path.pop();
    // The segment to remove; at the root there is none.
    let parent = memchr::memrchr(b'/', path).unwrap_or(0);
    path.truncate(parent);
    path.push(b'/');
    true
}

/// Returns the byte of two leading hexadecimal digits.
fn escaped(digits: &[u8]) -> Option<u8> {
    let digit = |at: usize| char::from(*digits.get(at)?).to_digit(16);
    u8::try_from(digit(0)? * 16 + digit(1)?).ok()
}

fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

fn needs_escape(byte: u8) -> bool {
    !byte.is_ascii_graphic() || matches!(byte, b'"' | b'<' | b'>' | b'`' | b'{' | b'}')
}

/// Merges adjacent slashes. A path of slashes alone becomes two of them, as in Envoy.
fn merge_slashes(path: &str) -> String {
    if path.len() > 1 && path.bytes().all(|byte| byte == b'/') {
        return "//".to_owned();
    }
    let mut new = String::with_capacity(path.len());
    for c in path.chars() {
        if c != '/' || !new.ends_with('/') {
            new.push(c);
        }
    }
    new
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn paths_are_normalised() {
        let table = [
            ("/a/b", "/a/b"),
            ("/", "/"),
            ("/a/./b", "/a/b"),
            ("/a/../b", "/b"),
            ("/a/b/..", "/a/"),
            ("/a/b/.", "/a/b/"),
            ("/..", "/"),
            ("/x/..;/admin", "/admin"),
            ("/x/..;a=b/admin", "/admin"),
            ("/.;x/admin", "/admin"),
            ("/x/%2e.;/admin", "/admin"),
            ("/x/y/..;", "/x/"),
            ("/x/..;\\admin", "/"),
            ("/x/.;a\\..\\b/c", "/x/c"),
            ("/x\\..\\b", "/b"),
            ("/x/...;/y", "/x/...;/y"),
            ("/x/a;..;/y", "/x/a;..;/y"),
            ("/../../a", "/a"),
            ("/a//b", "/a//b"),
            ("/a//../b", "/a/b"),
            ("/a/%2e%2E/b", "/b"),
            ("/a/.%2e/b", "/b"),
            ("/%61dmin", "/admin"),
            ("/a%2Fb", "/a%2Fb"),
            ("/a%zz%4", "/a%zz%4"),
            ("/a\\..\\b", "/b"),
            ("/...", "/..."),
            ("/.a/b.", "/.a/b."),
            ("/a b", "/a%20b"),
            ("/%%32e%%32e/a", "/%%32e%%32e/a"),
            ("/%2%65%2%45/a", "/%2%65%2%45/a"),
            ("/%252e/%zz%61", "/%252e/%zza"),
        ];
        for (path, expected) in table {
            assert_eq!(canonical(path).as_deref(), Some(expected), "{path}");
            assert!(!is_canonical(path) || path == expected, "{path}");
        }
        assert_eq!(canonical("/a%00"), None);
    }

    #[test]
    fn long_parameters_are_read_once() {
        // Heads may have several megabytes. Quadratic time would show here.
        for piece in ["\\", ";", "\\..;", "."] {
            let path = format!("/.;{}", piece.repeat(1 << 20));
            assert_eq!(canonical(&path).as_deref(), Some("/"), "{piece}");
        }
    }

    #[test]
    fn a_redirect_stays_on_its_host() {
        for (path, expected) in [
            ("/a/b?c", "/a/b?c"),
            ("/", "/"),
            ("//example.org/a", "/.//example.org/a"),
            ("/\\example.org", "/./\\example.org"),
        ] {
            assert_eq!(location(&RequestHead::build("GET", path, "h", &[])), expected);
        }
    }

    #[test]
    fn slashes_are_unescaped_and_merged() {
        assert_eq!(unescape_slashes("/a%2fb%5Cc%20").as_deref(), Some("/a/b\\c%20"));
        assert_eq!(unescape_slashes("/a%20%2"), None);
        assert_eq!(merge_slashes("//a///b/"), "/a/b/");
        assert_eq!(merge_slashes("///"), "//");
    }

    proptest! {
        #[test]
        fn a_normalised_path_has_no_dot_segments(path in "/[a./%2eE5cC\\\\ ~é-]{0,40}") {
            let Some(once) = canonical(&path) else { return Ok(()) };
            prop_assert!(once.starts_with('/'));
            prop_assert!(!once.split('/').any(|segment| segment == "." || segment == ".."), "{}", once);
            prop_assert!(!is_canonical(&path) || once == path);
        }

        #[test]
        fn normalisation_does_not_change_a_plain_target(target in "[a./?#%2\\*é -]{0,12}") {
            let path = target.split('?').next().unwrap_or_default();
            if is_plain(target.as_bytes()) {
                prop_assert!(!target.contains('#'));
                prop_assert!(!path.starts_with('/') || is_canonical(path));
                prop_assert_eq!(unescape_slashes(path), None);
                prop_assert_eq!(merge_slashes(path), path);
            }
        }
    }
}
