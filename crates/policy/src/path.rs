//! A path in normal form, before anything is decided by it: policies and routes must see what the upstream will.
//!
//! In Envoy's order: escaped slashes, RFC 3986 (dot segments, backslashes, needless escapes), runs of slashes.
//! The query stays as it is. A path already in normal form, nearly every one, costs one look.

use crate::{
    config::http::{EscapedSlashes, HttpManager},
    matching,
};
use skysail_http::head::RequestHead;

/// What comes of a request's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normalization {
    /// The request goes on, with the path that the head now has.
    Go,
    /// 400, [`crate::error::Kind::BadPath`].
    Reject,
    /// 307 to the path that the head now has: [`location`].
    Redirect,
}

/// Brings a request's path to normal form, as far as the manager wants it.
pub fn normalize(manager: &HttpManager, head: &mut RequestHead) -> Normalization {
    let original = head.path();
    if is_plain(original.as_bytes()) {
        return Normalization::Go;
    }
    if original.contains('#') {
        return Normalization::Reject;
    }
    // `*` and the empty path of CONNECT have no segments.
    if !original.starts_with('/') {
        return Normalization::Go;
    }
    let (path, query) = original.split_at(original.find('?').unwrap_or(original.len()));
    let mut outcome = Normalization::Go;
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
            _ => Normalization::Go,
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
    // What is refused keeps it, too: routes and logs see what would have been taken.
    if let Some(mut new) = new {
        new.push_str(query);
        head.set_path(&new);
    }
    outcome
}

/// Whether nothing that is done here could change a target, at one look: most are like that.
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

/// Where a redirect leads: to the path in normal form, as in Envoy. A path that begins with two slashes would read as
/// another host there (RFC 3986, 4.2); with a dot segment before them it stays a path.
pub fn location(head: &RequestHead) -> String {
    let path = head.path();
    let dot = if path.starts_with("//") || path.starts_with("/\\") { "/." } else { "" };
    format!("{dot}{path}")
}

/// `%2F` and `%5C` as what they stand for; `None` if there is none.
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

/// Whether [`canonical`] would change nothing. May say no without need, never yes wrongly.
fn is_canonical(path: &str) -> bool {
    !path.contains("/.") && path.bytes().all(|b| b != b'%' && b != b'\\' && !needs_escape(b))
}

/// RFC 3986, section 6.2.2: escapes that need not be are undone, dot segments resolved; and, as every browser
/// does it, a backslash is a slash. `None` for an escaped NUL, which no server reads as its neighbours do.
fn canonical(path: &str) -> Option<String> {
    let mut new: Vec<u8> = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    let mut in_parameters = false;
    while let [byte, after @ ..] = rest {
        rest = after;
        match *byte {
            // The parameters of a dot segment go on to the next slash, as in Envoy, and are left out with it.
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

/// Whether a digit would make an escape of a percent sign that stands by itself: `%%32e` must not become `%2e`,
/// which the upstream may read as a dot that nobody here has seen.
fn completes_escape(path: &[u8], digit: u8) -> bool {
    let stray = match path {
        [.., b'%'] => true,
        [.., b'%', first] => first.is_ascii_hexdigit(),
        _ => false,
    };
    stray && digit.is_ascii_hexdigit()
}

/// A slash ends a segment; one of dots takes effect.
fn end_segment(path: &mut Vec<u8>) {
    if !resolve_last(path) {
        path.push(b'/');
    }
}

/// What follows the last slash.
fn last_segment(path: &[u8]) -> &[u8] {
    memchr::memrchr(b'/', path).map_or(path, |slash| &path[slash + 1..])
}

/// Whether a dot segment, with parameters or without, goes up; `None` if it is no dot segment.
fn goes_up(segment: &[u8]) -> Option<bool> {
    match segment {
        b"." | [b'.', b';', ..] => Some(false),
        b".." | [b'.', b'.', b';', ..] => Some(true),
        _ => None,
    }
}

/// Takes a dot segment off the end, with what it undoes; the path then ends in a slash. Says whether there was one. Parameters of
/// a segment (`..;a=b`) make no other segment of it: servers that know them take them off first.
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
    // What lies before is the segment to undo; at the root there is none.
    let parent = memchr::memrchr(b'/', path).unwrap_or(0);
    path.truncate(parent);
    path.push(b'/');
    true
}

/// The byte that two hexadecimal digits at the beginning stand for.
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

/// Nothing but slashes becomes two of them, as in Envoy: one at the beginning and one at the end.
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
    fn normal_forms() {
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
        // As long as a head may be: work for each byte of the segment before it would be seen here.
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
    fn slashes() {
        assert_eq!(unescape_slashes("/a%2fb%5Cc%20").as_deref(), Some("/a/b\\c%20"));
        assert_eq!(unescape_slashes("/a%20%2"), None);
        assert_eq!(merge_slashes("//a///b/"), "/a/b/");
        assert_eq!(merge_slashes("///"), "//");
    }

    proptest! {
        #[test]
        fn a_normal_form_has_no_dot_segments_and_stays(path in "/[a./%2eE5cC\\\\ ~é-]{0,40}") {
            let Some(once) = canonical(&path) else { return Ok(()) };
            prop_assert!(once.starts_with('/'));
            prop_assert!(!once.split('/').any(|segment| segment == "." || segment == ".."), "{}", once);
            prop_assert!(!is_canonical(&path) || once == path);
        }

        #[test]
        fn what_is_plain_would_stay_as_it_is(target in "[a./?#%2\\*é -]{0,12}") {
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
