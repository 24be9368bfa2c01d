//! A small HTTP/1.1 server for one connection: `/` says hello, `/bytes?n=N` sends zeros, `/sink` counts a body, `/cpu`
//! tells CPU seconds. Requests follow each other on one connection; bodies may be counted or chunked.

use smoltcp::socket::tcp::Socket;

use super::services::{cpu_seconds, receive, room, send};

/// Longest head.
const HEAD: usize = 16 * 1024;
/// Longest line between chunks.
const LINE: usize = 1024;

#[derive(Default)]
pub(super) struct Http {
    /// Received and not used yet.
    input: Vec<u8>,
    state: State,
    /// To be sent.
    output: Vec<u8>,
    /// Zeros to be sent behind it.
    zeros: u64,
    close: bool,
}

#[derive(Default)]
enum State {
    #[default]
    Head,
    Body {
        left: u64,
        answer: Answer,
    },
    /// Before a chunk's size.
    ChunkSize {
        answer: Answer,
    },
    Chunk {
        left: u64,
        answer: Answer,
    },
    /// Lines behind the last chunk.
    Trailer {
        answer: Answer,
    },
}

/// What the request asked for.
#[derive(Clone, Copy)]
struct Answer {
    page: Page,
    body: u64,
    is_head: bool,
}

#[derive(Clone, Copy)]
enum Page {
    Hello,
    Bytes(u64),
    Sink,
    Cpu,
    BadRequest,
    NotFound,
}

impl Http {
    /// Something is still to be sent.
    pub(super) fn is_busy(&self) -> bool {
        !self.output.is_empty() || self.zeros > 0
    }

    pub(super) fn step(&mut self, socket: &mut Socket<'_>, name: &str, scratch: &mut [u8]) -> bool {
        let mut moved = self.flush(socket, scratch);
        // The next request waits until this one's answer is out.
        if self.is_busy() {
            return moved;
        }
        if self.close {
            socket.close();
            return false;
        }
        if self.input.is_empty() {
            let received = receive(socket, scratch);
            self.input.extend_from_slice(scratch.get(..received).unwrap_or_default());
            moved |= received > 0;
        } else if matches!(self.state, State::Head | State::ChunkSize { .. } | State::Trailer { .. }) {
            let mut more = [0; 2048];
            let received = receive(socket, &mut more);
            self.input.extend_from_slice(more.get(..received).unwrap_or_default());
            moved |= received > 0;
        }
        let remote = socket.remote_endpoint().map(|remote| remote.to_string()).unwrap_or_default();
        while !self.is_busy() && self.advance(name, &remote) {
            moved = true;
        }
        moved |= self.flush(socket, scratch);
        moved
    }

    fn flush(&mut self, socket: &mut Socket<'_>, scratch: &mut [u8]) -> bool {
        let sent = send(socket, &self.output);
        self.output.drain(..sent);
        let mut moved = sent > 0;
        if self.output.is_empty() && self.zeros > 0 {
            let want = usize::try_from(self.zeros).unwrap_or(usize::MAX).min(scratch.len()).min(room(socket));
            if let Some(zeros) = scratch.get_mut(..want) {
                zeros.fill(0);
                let sent = send(socket, zeros);
                self.zeros -= sent as u64;
                moved |= sent > 0;
            }
        }
        moved
    }

    /// Uses some of the input; false when there is not enough.
    fn advance(&mut self, name: &str, remote: &str) -> bool {
        match std::mem::take(&mut self.state) {
            State::Head => {
                let Some(end) = self.input.windows(4).position(|four| four == b"\r\n\r\n") else {
                    if self.input.len() > HEAD {
                        self.close = true;
                        self.input.clear();
                    }
                    return false;
                };
                let head: Vec<u8> = self.input.drain(..end + 4).collect();
                self.take_head(&String::from_utf8_lossy(&head));
            }
            State::Body { left: 0, answer } => self.reply(answer, name, remote),
            State::Body { left, mut answer } => {
                let taken = self.take_body(left);
                answer.body += taken;
                self.state = State::Body { left: left - taken, answer };
                return taken > 0;
            }
            State::ChunkSize { answer } => {
                let Some(line) = self.line() else {
                    self.state = State::ChunkSize { answer };
                    return false;
                };
                let size = line.split(';').next().unwrap_or_default().trim();
                self.state = match u64::from_str_radix(size, 16) {
                    // The line end behind a chunk.
                    _ if size.is_empty() => State::ChunkSize { answer },
                    Ok(0) => State::Trailer { answer },
                    Ok(left) => State::Chunk { left, answer },
                    Err(_) => {
                        self.close = true;
                        State::Body { left: 0, answer: Answer { page: Page::BadRequest, ..answer } }
                    }
                };
            }
            State::Chunk { left: 0, answer } => self.state = State::ChunkSize { answer },
            State::Chunk { left, mut answer } => {
                let taken = self.take_body(left);
                answer.body += taken;
                self.state = State::Chunk { left: left - taken, answer };
                return taken > 0;
            }
            State::Trailer { answer } => {
                let line = self.line();
                self.state = match line.as_deref() {
                    Some("") => State::Body { left: 0, answer },
                    _ => State::Trailer { answer },
                };
                return line.is_some();
            }
        }
        true
    }

    fn take_head(&mut self, head: &str) {
        let mut lines = head.lines();
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (method, target, version) = (words.next(), words.next(), words.next());
        let target = target.unwrap_or_default();
        let page = page(target);
        let answer = Answer { page, body: 0, is_head: method == Some("HEAD") };
        self.close = version != Some("HTTP/1.1");
        let mut body = State::Body { left: 0, answer };
        for line in lines {
            let Some((name, value)) = line.split_once(':') else { continue };
            let value = value.trim();
            match name.to_ascii_lowercase().as_str() {
                "content-length" => body = State::Body { left: value.parse().unwrap_or(0), answer },
                "transfer-encoding" if value.eq_ignore_ascii_case("chunked") => body = State::ChunkSize { answer },
                "connection" if value.eq_ignore_ascii_case("close") => self.close = true,
                "expect" => self.output.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n"),
                _ => {}
            }
        }
        self.state = body;
    }

    fn take_body(&mut self, left: u64) -> u64 {
        let taken = usize::try_from(left).unwrap_or(usize::MAX).min(self.input.len());
        self.input.drain(..taken);
        taken as u64
    }

    fn line(&mut self) -> Option<String> {
        let Some(end) = self.input.windows(2).position(|two| two == b"\r\n") else {
            if self.input.len() > LINE {
                self.close = true;
                self.input.clear();
            }
            return None;
        };
        let line: Vec<u8> = self.input.drain(..end + 2).collect();
        Some(String::from_utf8_lossy(line.get(..end).unwrap_or_default()).into_owned())
    }

    fn reply(&mut self, answer: Answer, name: &str, remote: &str) {
        let (status, body) = match answer.page {
            Page::Hello => ("200 OK", format!("hello from {name} to {remote}\n")),
            Page::Bytes(_) => ("200 OK", String::new()),
            Page::Sink => ("200 OK", format!("{}\n", answer.body)),
            Page::Cpu => ("200 OK", format!("{:.3}\n", cpu_seconds())),
            Page::BadRequest => ("400 Bad Request", "n?\n".into()),
            Page::NotFound => ("404 Not Found", "404 page not found\n".into()),
        };
        let (kind, length) = match answer.page {
            Page::Bytes(count) => ("application/octet-stream", count),
            _ => ("text/plain; charset=utf-8", body.len() as u64),
        };
        let connection = if self.close { "Connection: close\r\n" } else { "" };
        let head = format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{connection}\r\n");
        self.output.extend_from_slice(head.as_bytes());
        if !answer.is_head {
            self.output.extend_from_slice(body.as_bytes());
            if let Page::Bytes(count) = answer.page {
                self.zeros = count;
            }
        }
    }
}

fn page(target: &str) -> Page {
    // A proxy's form of the target has scheme and host in front.
    let target = match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').and_then(|at| rest.get(at..)).unwrap_or("/"),
        None => target,
    };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    match path {
        "/bytes" => {
            let count = query.split('&').find_map(|part| part.strip_prefix("n=")).and_then(|n| n.parse().ok());
            count.map_or(Page::BadRequest, Page::Bytes)
        }
        "/sink" => Page::Sink,
        "/cpu" => Page::Cpu,
        "/" => Page::Hello,
        _ => Page::NotFound,
    }
}
