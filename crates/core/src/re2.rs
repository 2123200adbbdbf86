//! Regular expressions in RE2's syntax, which Envoy and Istio use (<https://github.com/google/re2/wiki/Syntax>).
//!
//! The crate `regex` reads a similar syntax and gives the same guarantee of linear time. An expression is translated
//! where the two differ: `\d`, `\s`, `\w` and `\b` are ASCII in RE2, `[` is a plain character within a class, there are
//! no set operations such as `&&`, a `{` that begins no repetition is a plain character, and `\Q…\E`, `\C` and octal
//! codes exist. Without that, a policy could match what Envoy does not match, or the reverse.

use std::{iter::Peekable, str::Chars};

use regex::{
    bytes::{Regex, RegexBuilder},
    escape,
};

/// Maximum memory of a compiled expression in bytes. RE2 has a similar limit.
const MAX_SIZE: usize = 1 << 20;
/// Maximum number of repetitions (`{n,m}`), as in RE2.
const MAX_REPEAT: u32 = 1_000;
/// Names of classes, as in `[[:alpha:]]`.
const NAMED_CLASSES: [&str; 14] = [
    "alnum", "alpha", "ascii", "blank", "cntrl", "digit", "graph", "lower", "print", "punct", "space",
    "upper", "word", "xdigit",
];

/// Compiles an expression that may match any part of a text.
///
/// # Errors
/// RE2 refuses the expression, or it is too large.
pub fn compile(expression: &str) -> Result<Regex, String> {
    build(&translate(expression)?)
}

/// Compiles an expression that must match a whole text.
///
/// # Errors
/// RE2 refuses the expression, or it is too large.
pub fn compile_whole(expression: &str) -> Result<Regex, String> {
    build(&format!("^(?:{})$", translate(expression)?))
}

fn build(translated: &str) -> Result<Regex, String> {
    RegexBuilder::new(translated).size_limit(MAX_SIZE).build().map_err(|error| {
        // The message of a syntax error shows the expression in several lines; its last line has the reason.
        let error = error.to_string();
        error.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
    })
}

/// Translates an expression to the syntax of the crate `regex`. Groups are balanced in the result. Other errors may be
/// left to that crate.
fn translate(expression: &str) -> Result<String, String> {
    let mut out = String::with_capacity(expression.len() + 16);
    let mut rest = expression.chars().peekable();
    let mut depth = 0_usize;
    while let Some(c) = rest.next() {
        match c {
            '\\' => push_escape(&mut out, &mut rest)?,
            '[' => push_class(&mut out, &mut rest)?,
            '(' => {
                depth += 1;
                check_flags(&rest)?;
                out.push('(');
            }
            ')' => {
                depth = depth.checked_sub(1).ok_or("unopened group")?;
                out.push(')');
            }
            '{' if !is_repetition(&rest)? => out.push_str("\\{"),
            '*' | '+' | '?' | '{' => push_repetition(&mut out, c, &mut rest)?,
            _ => out.push(c),
        }
    }
    if depth > 0 { Err("unclosed group".to_owned()) } else { Ok(out) }
}

/// Refuses flags of a group that RE2 does not have.
fn check_flags(rest: &Peekable<Chars<'_>>) -> Result<(), String> {
    let mut rest = rest.clone();
    if rest.next() != Some('?') || matches!(rest.peek(), Some('P' | '<')) {
        return Ok(());
    }
    match rest.find(|c| !matches!(c, 'i' | 'm' | 's' | 'U' | '-')) {
        Some(flag) if flag.is_alphabetic() => Err(format!("RE2 has no flag {flag}; it has i, m, s and U")),
        _ => Ok(()),
    }
}

/// Returns whether a repetition such as `{2,3}` begins before `rest`.
fn is_repetition(rest: &Peekable<Chars<'_>>) -> Result<bool, String> {
    let text: String = rest.clone().take_while(|c| c.is_ascii_digit() || *c == ',').collect();
    let ends = rest.clone().nth(text.len()) == Some('}');
    let (min, max) = text.split_once(',').unwrap_or((&text, ""));
    if !ends || min.is_empty() || max.contains(',') {
        return Ok(false);
    }
    let is_small =
        |count: &str| count.is_empty() || count.parse().is_ok_and(|count: u32| count <= MAX_REPEAT);
    if is_small(min) && is_small(max) { Ok(true) } else { Err(format!("a repetition exceeds {MAX_REPEAT}")) }
}

/// Copies a repetition. RE2 has no repetition of a repetition, such as `a**`.
fn push_repetition(out: &mut String, first: char, rest: &mut Peekable<Chars<'_>>) -> Result<(), String> {
    out.push(first);
    if first == '{' {
        out.extend(rest.by_ref().take_while(|c| *c != '}'));
        out.push('}');
    }
    out.extend(rest.next_if_eq(&'?'));
    let mut ahead = rest.clone();
    match ahead.next() {
        Some('*' | '+' | '?') => Err("a repetition of a repetition".to_owned()),
        Some('{') if is_repetition(&ahead)? => Err("a repetition of a repetition".to_owned()),
        _ => Ok(()),
    }
}

/// Translates an escape sequence outside of a class, without its `\`.
fn push_escape(out: &mut String, rest: &mut Peekable<Chars<'_>>) -> Result<(), String> {
    match rest.peek() {
        Some('b') => out.push_str(r"(?-u:\b)"),
        Some('B') => out.push_str(r"(?-u:\B)"),
        Some('C') => out.push_str("(?s-u:.)"),
        Some('A') => out.push_str(r"\A"),
        Some('z') => out.push_str(r"\z"),
        Some('Q') => {
            rest.next();
            while let Some(c) = rest.next() {
                if c == '\\' && rest.next_if_eq(&'E').is_some() {
                    break;
                }
                out.push_str(&escape(c.encode_utf8(&mut [0; 4])));
            }
            return Ok(());
        }
        _ => {
            out.push_str(&escaped(rest)?.0);
            return Ok(());
        }
    }
    rest.next();
    Ok(())
}

/// Reads an escape sequence that may also be part of a class, without its `\`. Returns its translation, and whether it
/// is a class itself.
fn escaped(rest: &mut Peekable<Chars<'_>>) -> Result<(String, bool), String> {
    let c = rest.next().ok_or("a backslash at the end")?;
    let class = match c {
        'd' => "[0-9]",
        'D' => "[^0-9]",
        's' => r"[\t\n\f\r ]",
        'S' => r"[^\t\n\f\r ]",
        'w' => "[0-9A-Za-z_]",
        'W' => "[^0-9A-Za-z_]",
        'p' | 'P' => return Ok((property(c, rest)?, true)),
        _ => "",
    };
    if !class.is_empty() {
        return Ok((class.to_owned(), true));
    }
    let one = match c {
        'a' | 'f' | 'n' | 'r' | 't' | 'v' => format!("\\{c}"),
        'x' => hexadecimal(rest)?,
        '0' | '1'..='7' => {
            let more =
                |rest: &mut Peekable<Chars<'_>>| rest.next_if(|c| c.is_digit(8)).and_then(|c| c.to_digit(8));
            let (first, second) = (c.to_digit(8).unwrap_or_default(), more(rest));
            // A single digit from 1 would be a reference to a group, which RE2 does not have.
            let code = match (first, second) {
                (1.., None) => return Err(format!("invalid escape sequence \\{c}")),
                (_, None) => first,
                (_, Some(second)) => match more(rest) {
                    None => first * 8 + second,
                    Some(third) => (first * 8 + second) * 8 + third,
                },
            };
            format!("\\x{{{code:x}}}")
        }
        _ if c.is_ascii_punctuation() || c == ' ' => escape(c.encode_utf8(&mut [0; 4])),
        _ => return Err(format!("invalid escape sequence \\{c}")),
    };
    Ok((one, false))
}

/// Reads the rest of `\pL`, `\p{Greek}` or `\p{^Greek}`.
fn property(kind: char, rest: &mut Peekable<Chars<'_>>) -> Result<String, String> {
    let name: String = match rest.next() {
        Some('{') => {
            let name: String = rest.by_ref().take_while(|c| *c != '}').collect();
            name
        }
        Some(letter) => letter.into(),
        None => return Err(format!("\\{kind} needs a class")),
    };
    let (kind, name) = match (kind, name.strip_prefix('^')) {
        ('p', Some(name)) => ('P', name),
        ('P', Some(name)) => ('p', name),
        (kind, None) => (kind, &*name),
        (_, Some(_)) => return Err("invalid class".to_owned()),
    };
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return Err(format!("{name:?} is not a Unicode class"));
    }
    Ok(format!("\\{kind}{{{name}}}"))
}

/// Reads the rest of `\x7F` or `\x{10FFFF}`.
fn hexadecimal(rest: &mut Peekable<Chars<'_>>) -> Result<String, String> {
    let digits: String = match rest.next_if_eq(&'{') {
        Some(_) => rest.by_ref().take_while(|c| *c != '}').collect(),
        None => rest.by_ref().take(2).collect(),
    };
    let code =
        u32::from_str_radix(&digits, 16).ok().filter(|_| !digits.starts_with('+')).and_then(char::from_u32);
    let code = code.ok_or_else(|| format!("\\x{digits} is not a character"))?;
    Ok(format!("\\x{{{:x}}}", u32::from(code)))
}

/// Translates a class, without its `[`.
fn push_class(out: &mut String, rest: &mut Peekable<Chars<'_>>) -> Result<(), String> {
    let unclosed = || "a class without its ]".to_owned();
    out.push('[');
    if rest.next_if_eq(&'^').is_some() {
        out.push('^');
    }
    let mut first = true;
    loop {
        if !std::mem::take(&mut first) && rest.next_if_eq(&']').is_some() {
            out.push(']');
            return Ok(());
        }
        if let Some(named) = named_class(rest)? {
            out.push_str(&named);
            continue;
        }
        let (low, is_class) = member(rest).ok_or_else(unclosed)??;
        out.push_str(&low);
        let mut ahead = rest.clone();
        if !is_class && ahead.next() == Some('-') && ahead.peek().is_some_and(|c| *c != ']') {
            rest.next();
            let (high, is_class) = member(rest).ok_or_else(unclosed)??;
            if is_class {
                return Err("a range of characters ends with a class".to_owned());
            }
            out.push('-');
            out.push_str(&high);
        }
    }
}

/// Reads `[:alpha:]` or `[:^alpha:]`, if it follows.
fn named_class(rest: &mut Peekable<Chars<'_>>) -> Result<Option<String>, String> {
    let mut ahead = rest.clone();
    if ahead.next() != Some('[') || ahead.next() != Some(':') {
        return Ok(None);
    }
    let name: String = ahead.by_ref().take_while(|c| *c == '^' || c.is_ascii_alphanumeric()).collect();
    // `take_while` has consumed the `:`.
    if ahead.next() != Some(']') || rest.clone().nth(2 + name.len()) != Some(':') {
        return Ok(None);
    }
    if !NAMED_CLASSES.contains(&name.trim_start_matches('^')) {
        return Err(format!("[:{name}:] is not a class"));
    }
    *rest = ahead;
    Ok(Some(format!("[:{name}:]")))
}

/// Reads a member of a class: a character, or a class such as `\d` with true; `None` at the end of the expression.
fn member(rest: &mut Peekable<Chars<'_>>) -> Option<Result<(String, bool), String>> {
    Some(match rest.next()? {
        '\\' => escaped(rest),
        c => Ok((escape(c.encode_utf8(&mut [0; 4])), false)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(expression: &str, text: &str) -> bool {
        compile_whole(expression)
            .unwrap_or_else(|error| panic!("{expression}: {error}"))
            .is_match(text.as_bytes())
    }

    #[test]
    fn classes_are_ascii() {
        for (class, inside, outside) in [
            (r"\d", "5", "٥"),
            (r"\w", "a", "ä"),
            (r"\s", "\t", "\u{a0}"),
            (r"\s", " ", "\u{b}"),
            (r"\D", "٥", "5"),
            (r"[^\w]", "ä", "a"),
            (r"[\D5]", "5", "6"),
            (r"[[:alpha:]]", "a", "ä"),
            (r"\p{Greek}", "α", "a"),
            (r"\p{^Greek}", "a", "α"),
            (r"\pL", "ä", "5"),
            (r"\PL", "5", "ä"),
        ] {
            assert!(matches(class, inside), "{class} {inside}");
            assert!(!matches(class, outside), "{class} {outside}");
        }
        let boundary = compile(r"\ba").unwrap();
        assert!(boundary.is_match("äa".as_bytes()));
        assert!(!boundary.is_match(b"ba"));
    }

    #[test]
    fn a_dot_is_a_character_and_folding_is_unicode() {
        assert!(matches("...", "äöü"));
        assert!(!compile_whole(".").unwrap().is_match(b"\xff"));
        assert!(compile_whole(r"\C").unwrap().is_match(b"\xff"));
        assert!(matches("(?i)ÄB", "äb"));
        assert!(!matches(".", "\n"));
        assert!(matches("(?s).", "\n"));
    }

    #[test]
    fn brackets_and_operators_are_plain_in_classes() {
        for (expression, text) in [
            ("[[]", "["),
            ("[^[]", "a"),
            ("[]]", "]"),
            ("[^]]", "a"),
            ("[a&&b]+", "a&b"),
            ("[a~~b]+", "~"),
            ("[+--]+", "+,-"),
            ("[--/]+", "-./"),
            ("[a-]+", "a-"),
            (r"[\d-z]+", "7-z"),
            (r"[\]\\]+", r"]\"),
            ("[[:a]+", "[:a"),
            ("[[:digit:]x]+", "4x"),
        ] {
            assert!(matches(expression, text), "{expression} {text}");
        }
        assert!(!matches("[a&&b]", "c"));
        assert!(!matches("[+--]", "."));
    }

    #[test]
    fn literal_forms() {
        for (expression, text) in [
            ("/users/{id}", "/users/{id}"),
            ("a{,2}", "a{,2}"),
            ("a{2,}", "aaa"),
            (r"\Qa.b\E.", "a.bc"),
            (r"\Q(a", "(a"),
            (r"(\Q)\E)+", "))"),
            (".{1,1000}", "äö"),
            (r"[^/]{1,255}\.(?i)[a-zé]{0,1000}", "a.É"),
            (&r"\Q\E".repeat(100_000), ""),
            (r"\<a\>", "<a>"),
            (r"\x41\x{42}\103\0", "ABC\0"),
            (r"\-\/\ ", "-/ "),
            (r"(?P<name>a)(?i:B)", "ab"),
        ] {
            assert!(matches(expression, text), "{expression} {text}");
        }
    }

    #[test]
    fn what_re2_refuses_is_refused() {
        for expression in [
            "a)|(?:b",
            "(a",
            "[a",
            "[",
            "a\\",
            r"\y",
            r"\1",
            r"\E",
            r"[\b]",
            "a{1001}",
            "(?x)a",
            "(?=a)",
            "(?<=a)",
            "*a",
            "a**",
            "a{2}{3}",
            "a+?+",
            "[z-a]",
            r"[a-\d]",
            "[[:nothing:]]",
            r"\p{Nothing}",
            r"\x{110000}",
            r"\xg0",
            "(?P=a)",
            r"\ä",
        ] {
            assert!(compile(expression).is_err(), "{expression}");
            assert!(compile_whole(expression).is_err(), "{expression}");
        }
    }
}
