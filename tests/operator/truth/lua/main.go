// Runs Lua as Argo CD does: `persist-lua health|discovery|action SCRIPT`, with resources as JSON, one after another, on standard input, and
// for each one line with what the script returns: a health, the actions, or the changed resource.
//
// The sandbox is that of Argo CD's util/lua: base, table and package, of os only time and date, no string library, one second.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	lua "github.com/yuin/gopher-lua"
)

func main() {
	if err := run(os.Args[2], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(script string, in io.Reader, out io.Writer) error {
	decoder, encoder := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var resource map[string]any
		if err := decoder.Decode(&resource); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		answer, err := answer(script, resource)
		if err != nil {
			return err
		}
		if err := encoder.Encode(answer); err != nil {
			return err
		}
	}
}

func answer(script string, resource map[string]any) (any, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for _, open := range []lua.LGFunction{lua.OpenPackage, lua.OpenBase, lua.OpenTable} {
		state.Push(state.NewFunction(open))
		state.Call(0, 0)
	}
	state.PreloadModule("os", safeOs)
	deadline, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	state.SetContext(deadline)
	state.SetGlobal("obj", toLua(state, resource))
	if err := state.DoFile(script); err != nil {
		return nil, err
	}
	table, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		return nil, fmt.Errorf("%s returns a %s, not a table", script, state.Get(-1).Type())
	}
	return fromLua(table), nil
}

// safeOs is what `require("os")` gives. There is no global os.
func safeOs(state *lua.LState) int {
	lua.OpenOs(state)
	all := state.GetGlobal("os").(*lua.LTable)
	state.SetGlobal("os", lua.LNil)
	safe := state.NewTable()
	for _, name := range []string{"time", "date"} {
		safe.RawSetString(name, all.RawGetString(name))
	}
	state.Push(safe)
	return 1
}

func toLua(state *lua.LState, value any) lua.LValue {
	switch known := value.(type) {
	case map[string]any:
		table := state.NewTable()
		for name, each := range known {
			table.RawSetString(name, toLua(state, each))
		}
		return table
	case []any:
		table := state.NewTable()
		for _, each := range known {
			table.Append(toLua(state, each))
		}
		return table
	case string:
		return lua.LString(known)
	case float64:
		return lua.LNumber(known)
	case bool:
		return lua.LBool(known)
	}
	return lua.LNil
}

func fromLua(value lua.LValue) any {
	switch known := value.(type) {
	case *lua.LTable:
		if known.Len() > 0 {
			list := []any{}
			known.ForEach(func(_, each lua.LValue) { list = append(list, fromLua(each)) })
			return list
		}
		object := map[string]any{}
		known.ForEach(func(name, each lua.LValue) { object[name.String()] = fromLua(each) })
		return object
	case lua.LString:
		return string(known)
	case lua.LNumber:
		return float64(known)
	case lua.LBool:
		return bool(known)
	}
	return nil
}
