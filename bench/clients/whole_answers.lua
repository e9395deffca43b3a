-- A script for wrk: sends as many requests as given, then stays silent. Reports on standard output when the last answer
-- has arrived, or which one failed.
--   wrk … --script whole_answers.lua URL -- BODY-FILE ANSWERS

local begun, answered, total = 0, 0, 0
local NEVER_MS = 3600000

function init(arguments)
  local file = assert(io.open(arguments[1]))
  wrk.method = "POST"
  wrk.body = file:read("*a")
  wrk.headers["Content-Type"] = "application/json"
  file:close()
  total = tonumber(arguments[2])
end

-- wrk calls this before each request for the delay in milliseconds.
function delay()
  begun = begun + 1
  return begun > total and NEVER_MS or 0
end

local function report(line)
  io.stdout:write(line, "\n")
  io.stdout:flush()
end

function response(status, _, body)
  answered = answered + 1
  if status ~= 200 or not body:find("data: [DONE]", -40, true) then
    report("failed: status " .. status .. ", ends in " .. string.format("%q", body:sub(-200)))
  elseif answered == total then
    report("all answered")
  end
end
